"""Engines: several ways to one computation, chosen for the caller.

``"reference"`` the formulas, which autograd and ``torch.func`` differentiate; ``"eager"`` plain
torch operators on blocks of samples; ``"compiled"`` the same by ``torch.compile``; ``"fused"`` C++
on the CPU; ``"triton"`` one kernel on a GPU. ``selection.describe()`` says which one ``"auto"``
takes on this machine, ``selection.available()`` why another one can't be used.
"""
