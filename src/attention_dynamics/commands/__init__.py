r"""The commands of ``attention-dynamics``, one module each: what is behind the shell's words.

A module has ``add(commands)``, which declares the command and its options on the subparsers of
:mod:`attention_dynamics.cli`, and a function of the parsed options that does it and returns its
exit status.
"""
