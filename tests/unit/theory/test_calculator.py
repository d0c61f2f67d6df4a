"""The calculator: what enters and what does not, labels, probabilities, limits, and real runs."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_dynamics.data.streams import generator
from attention_dynamics.data.tokens import unit_ball_tokens
from attention_dynamics.models.parameters import independent_initialisation
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.theory import (
    UNIT_BALL,
    InputBounds,
    Teacher,
    TransportNorms,
    random_multi_anchor,
)
from attention_dynamics.theory.a_priori import a_priori_constants
from attention_dynamics.theory.approximation import (
    approximation_bound,
    bernstein_approximation_bound,
    head_second_moment,
)
from attention_dynamics.theory.bounds import network_constants
from attention_dynamics.theory.calculator import BoundCalculator
from attention_dynamics.theory.requirements import required_steps, required_width, requirement
from attention_dynamics.theory.setting import Setting, Start
from attention_dynamics.theory.trajectory import record_trajectory
from attention_dynamics.training import DescentConfig, Radii, projected_gradient_descent

SETTING = Setting(
    heads=256, samples=500, length=16, dimension=8, steps=4000, step_size=0.02,
    radii=Radii(1.0, 1.0, 1.0), transport_norms=TransportNorms(1.0, 1.0, 1.0), inputs=UNIT_BALL,
)  # fmt: skip
FAST = BoundCalculator()
PAPER = BoundCalculator(
    form="paper", concentration="largest", tail="mcdiarmid", error="sup"
)  # the dependences of the paper


@settings(max_examples=15)
@given(T=st.integers(1, 10**9), form=st.sampled_from(["fast", "paper"]))
def test_the_sequence_length_has_no_effect(T, form):
    calculator = BoundCalculator(form=form, error="sup")
    assert calculator.bound(replace(SETTING, length=T)) == calculator.bound(SETTING)


def test_the_number_of_samples_enters_the_maximum_alone():
    for calculator in (FAST, BoundCalculator(form="paper")):
        assert calculator.bound(replace(SETTING, samples=10**9)) == calculator.bound(SETTING)
    few, many = (
        PAPER.ingredients(replace(SETTING, samples=n)).approximation for n in (10**2, 10**8)
    )
    assert many / few == pytest.approx(
        math.sqrt(math.log(2 * 10**8 / 0.05) / math.log(2 * 10**2 / 0.05)), rel=1e-3
    )  # up to the bias, which has no n


def test_the_table_says_what_each_number_is():
    bound = FAST.bound(SETTING)
    table = bound.table()
    assert list(table.index) == [
        "optimisation", "approximation", "linearisation", "average", "total",
    ]  # fmt: skip
    assert list(table.columns) == ["value", "unit", "label", "probability"]
    assert set(table["label"]) == {"a priori"}
    assert list(table["unit"]) == ["root loss"] * 3 + ["loss"] * 2
    assert table.loc["total", "value"] == bound.total
    assert set(table["probability"]) == {0.9}
    paper = PAPER.bound(SETTING).table()
    assert set(paper["unit"]) == {"loss"}
    assert paper["value"].iloc[:3].sum() == pytest.approx(paper.loc["total", "value"])


def test_the_ingredients_are_the_constants_of_the_theory():
    setting = replace(SETTING, radii=Radii(2.0, 1.5, 3.0), noise=0.3)
    nu, inner = setting.transport_norms, Radii(1.0, 1.0, 1.0)
    law = {"delta": 0.05, "inputs": UNIT_BALL}
    outer = a_priori_constants(256, 8, setting.radii, transport_norms=nu, **law)
    at_target = a_priori_constants(256, 8, inner, **law)
    found = FAST.ingredients(setting)
    assert found.distance_squared == pytest.approx(3.0)
    assert found.gradient_squared == outer.gradient_squared
    assert found.linearisation == pytest.approx(
        (at_target.linearisation + outer.remainder) / math.sqrt(256)
    )
    assert found.averaging == pytest.approx(2 * outer.linearisation / math.sqrt(256))
    approximation = bernstein_approximation_bound(nu, 256, delta=0.05, inputs=UNIT_BALL)
    assert found.approximation == pytest.approx(approximation.rms + 0.3)
    Y = math.sqrt(head_second_moment(nu, inputs=UNIT_BALL))
    assert found.size == pytest.approx(outer.output + Y + 0.3)
    assert FAST.bound(setting).initial_loss == pytest.approx((Y + 0.3) ** 2)
    cut = approximation_bound(
        nu, 256, 8, delta_prime=0.05, samples=500, delta=0.05, inputs=UNIT_BALL
    )
    assert PAPER.ingredients(setting).approximation == pytest.approx(cut.sup + 0.3)
    initial = ShallowTransformer.symmetric(256, 8, query="last", seed=0).snapshot()
    drawn = network_constants(initial, setting.radii, transport_norms=nu, inputs=UNIT_BALL)
    measured = replace(FAST, mode="posterior").ingredients(setting, Start(initial, 0.7, 0.5))
    assert measured.gradient_squared == drawn.gradient_squared
    assert (measured.approximation, measured.distance_squared) == (0.7, 0.25)


@pytest.mark.parametrize(
    ("concentration", "tail", "failures"),
    [
        ("largest", "mcdiarmid", 0.03 + 0.01),
        ("mean", "mcdiarmid", 0.03 + 2 * 0.01),
        ("mean", "bernstein", 0.03 + 0.01),
        ("largest", "bernstein", 0.03 + 0.01),
    ],
)
def test_each_event_is_paid_for_once(concentration, tail, failures):
    setting = replace(SETTING, delta=0.03, delta_prime=0.01)
    calculator = BoundCalculator(concentration=concentration, tail=tail)
    assert calculator.bound(setting).probability == pytest.approx(1 - failures)
    # Whether the projection acts depends on the largest head, whatever bounds the averages.
    extra = 0.01 if (concentration, tail) == ("mean", "bernstein") else 0.0
    assert calculator.no_projection(setting).probability == pytest.approx(1 - failures - extra)
    start = Start(ShallowTransformer.symmetric(256, 8, query="last", seed=0).snapshot())
    measured = replace(calculator, mode="posterior")
    left = 0.03 + (0.01 if tail == "mcdiarmid" else 0.0)
    assert measured.bound(setting, start).probability == pytest.approx(1 - left)
    assert measured.bound(setting, replace(start, approximation_error=0.1)).probability == 1.0
    certain = replace(setting, delta=0.6, delta_prime=0.6)
    assert calculator.bound(certain).probability == 0.0


def test_the_form_of_the_paper_is_recovered():
    # With eta = 1/sqrt(tau): D^2/sqrt(tau), D sqrt(log(n/delta)/m), sqrt(D^3/m), D ~ d for large d.
    def terms(calculator, d, m=2**50, tau=10**8):
        setting = replace(SETTING, dimension=d, heads=m, steps=tau, step_size=None)
        return calculator.bound(setting).terms

    def exponent(calculator, term, small, large, **sizes):
        a, b = terms(calculator, small, **sizes), terms(calculator, large, **sizes)
        return math.log(getattr(b, term) / getattr(a, term)) / math.log(large / small)

    sharp = replace(PAPER, tail="bernstein")
    for calculator in (PAPER, sharp):
        assert exponent(calculator, "optimisation", 10**6, 10**8) == pytest.approx(2, abs=0.03)
        assert exponent(calculator, "linearisation", 10**6, 10**8) == pytest.approx(1.5, abs=0.03)
    # Through the largest head the approximation costs sqrt(D) more than in the paper; without it
    # the paper's sqrt(D log(n/delta)/m) is reached.
    assert exponent(PAPER, "approximation", 10**6, 10**8) == pytest.approx(1, abs=0.03)
    assert exponent(sharp, "approximation", 10**6, 10**8) == pytest.approx(0.5, abs=0.03)
    one, two = terms(sharp, 8, tau=10**6), terms(sharp, 8, tau=10**8)
    assert one.optimisation / two.optimisation == pytest.approx(10)
    wide, wider = (terms(replace(sharp, concentration="mean"), 8, m=2**k) for k in (40, 44))
    assert wide.approximation / wider.approximation == pytest.approx(4, rel=1e-2)
    assert wide.linearisation / wider.linearisation == pytest.approx(4, rel=1e-2)
    # The optimisation term by its formula.
    found = PAPER.ingredients(replace(SETTING, step_size=None))
    assert PAPER.bound(replace(SETTING, step_size=None)).terms.optimisation == pytest.approx(
        (found.distance_squared / 4 + found.gradient_squared * found.size**2) / math.sqrt(4000)
    )


def test_the_loss_falls_like_one_over_tau_at_a_constant_step():
    bounds = [FAST.bound(replace(SETTING, heads=2**58, steps=10**k)).total for k in (3, 4, 5)]
    for a, b in itertools.pairwise(bounds):
        assert a / b == pytest.approx(10, rel=1e-2)
    root = [
        FAST.bound(replace(SETTING, heads=2**58, steps=10**k, step_size=None)).total
        for k in (10, 12)
    ]
    assert root[0] / root[1] == pytest.approx(10, rel=1e-2)


def test_everything_vanishes_in_the_limit_but_the_noise():
    far = replace(SETTING, heads=2**60, steps=2**60)
    assert FAST.bound(far).total < 1e-9
    noisy = FAST.bound(replace(far, noise=0.2))
    assert noisy.total == pytest.approx((0.2 / (1 - noisy.kappa)) ** 2, rel=1e-3)
    small = replace(far, noise=0.2, step_size=1e-4, steps=2**61)
    assert FAST.bound(small).total == pytest.approx(0.04, rel=1e-2)
    assert not FAST.bound(far).vacuous
    assert FAST.bound(replace(SETTING, heads=8)).vacuous


@settings(max_examples=12)
@given(
    pairs=st.integers(1, 10**7), d=st.integers(1, 40), tau=st.integers(1, 10**9),
    share=st.floats(1.0, 3.0), form=st.sampled_from(["fast", "paper"]),
)  # fmt: skip
def test_more_heads_steps_and_doubt_never_raise_the_bound(pairs, d, tau, share, form):
    calculator = BoundCalculator(form=form)
    base = replace(SETTING, heads=2 * pairs, dimension=d, steps=tau, step_size=1e-5)
    least = calculator.bound(base).total * (1 + 1e-6)
    assert calculator.bound(replace(base, heads=4 * pairs)).total <= least
    assert calculator.bound(replace(base, steps=2 * tau)).total <= least
    assert calculator.bound(replace(base, delta=0.05 * share)).total <= least
    assert calculator.bound(replace(base, delta_prime=0.05 * share)).total <= least
    nu = TransportNorms(1 / share, 1 / share, 1 / share)
    assert calculator.bound(replace(base, transport_norms=nu)).total <= least


def test_only_the_largest_head_brings_the_logarithm_of_m():
    def gradient(concentration, m):
        calculator = BoundCalculator(concentration=concentration)
        return calculator.ingredients(replace(SETTING, heads=m)).gradient_squared

    assert gradient("mean", 2**55) == pytest.approx(gradient("mean", 2**30), rel=1e-3)
    assert gradient("largest", 2**55) > 1.4 * gradient("largest", 2**30)


def test_a_step_that_is_too_long_is_flagged_and_given_the_form_that_holds():
    long = replace(SETTING, step_size=1.0)
    found = FAST.bound(long)
    assert found.form == "paper"
    assert found.kappa >= 1
    assert len(found.flags) == 1
    assert "the fast form needs a step size below" in found.flags[0]
    assert found.terms == BoundCalculator(form="paper").bound(long).terms
    assert FAST.bound(SETTING).flags == ()
    asked = replace(FAST, form="paper").bound(long)
    assert asked.flags == found.flags
    assert asked.table().attrs == {"kappa": asked.kappa, "flags": asked.flags}
    with pytest.raises(ValueError, match="expected kappa"):
        FAST.no_projection(long)


def test_longer_tokens_are_rescaled_and_said_to_be():
    longer = FAST.bound(replace(SETTING, inputs=InputBounds(1.5, 0.9), step_size=0.001))
    assert "tokens of norm <= 1.5, query <= 0.9" in longer.flags[0]
    assert longer.total > FAST.bound(replace(SETTING, step_size=0.001)).total


def test_stochastic_descent_has_the_same_numbers_in_expectation():
    stochastic = replace(FAST, descent="ProjSGD")
    assert stochastic.bound(SETTING).terms == FAST.bound(SETTING).terms
    assert stochastic.bound(SETTING).quantity == "E[L_n(averaged) | phi_0]"
    assert FAST.bound(SETTING).quantity == "L_n(averaged)"
    with pytest.raises(ValueError, match="descent: expected ProjGD"):
        stochastic.no_projection(SETTING)


@pytest.mark.parametrize("block", ["c", "U", "W"])
def test_a_radius_below_the_transport_norm_is_refused(block):
    with pytest.raises(ValueError, match=rf"radii\.{block}: expected at least transport_norms"):
        replace(SETTING, radii=Radii(**({"c": 1.0, "U": 1.0, "W": 1.0} | {block: 0.9})))
    with pytest.raises(ValueError, match=rf"radii\.{block}: expected a number, got None"):
        replace(SETTING, radii=Radii(**({"c": 1.0, "U": 1.0, "W": 1.0} | {block: None})))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"heads": 5}, ValueError, "heads: expected an even number of paired heads, got 5"),
        ({"length": 0}, ValueError, "length: expected an integer >= 1, got 0"),
        ({"samples": 1.5}, ValueError, "samples: expected an integer >= 1, got 1.5"),
        ({"steps": 0}, ValueError, "steps: expected an integer >= 1"),
        ({"delta": 0.0}, ValueError, "delta: expected a probability"),
        ({"delta_prime": 1.0}, ValueError, "delta_prime: expected a probability"),
        ({"step_size": 0.0}, ValueError, "step_size: expected a finite number > 0"),
        ({"noise": -1.0}, ValueError, "noise: expected a finite number >= 0"),
        ({"activation": "relu"}, ValueError, "activation: expected one of"),
        ({"inputs": (1.0, 1.0)}, TypeError, "inputs: expected InputBounds"),
        ({"transport_norms": 1.0}, TypeError, "transport_norms: expected TransportNorms"),
    ],
)
def test_settings_out_of_range_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        replace(SETTING, **changes)


def test_unknown_words_are_refused():
    for name in ("mode", "form", "descent", "concentration", "tail", "error"):
        with pytest.raises(ValueError, match=f"{name}: expected one of .*, got 'other'"):
            BoundCalculator(**{name: "other"})


def run_of(seed=0, query="last", activation="tanh", batch_size=None, m=32, nu=0.5, draws=0):
    """A setting with small norms, its start measured, the run of it, and its trajectory."""
    d, T, n = 3, 4, 12
    norms = TransportNorms(nu, nu, nu)
    transport = random_multi_anchor(
        3, T, d, generator=generator(seed, "a"), norms=norms, query=query, activation=activation
    )
    tokens = unit_ball_tokens(n, T, d, generator=generator(seed, "t"))
    y = Teacher(transport, generator=generator(seed, "T"), heads=2000)(tokens)
    model = ShallowTransformer.symmetric(m, d, query=query, activation=activation, seed=seed)
    start = Start.measure(model.snapshot(), transport, tokens, y)
    own = transport.sup_norm_bounds()  # above nu where s_1 > 1
    radii = Radii(*(max(r, nu) for r in (own.c, own.U, own.W)))
    config = DescentConfig(50, step_size=0.05, radii=radii, batch_size=batch_size, seed=draws)
    setting = Setting(
        heads=m, samples=n, length=T, dimension=d, steps=50, step_size=0.05, radii=radii,
        transport_norms=own, inputs=UNIT_BALL, activation=activation,
    )  # fmt: skip
    star = start.initial.plus(transport(start.initial).scaled(m**-0.5))
    data = [x.double() for x in (tokens, y)]
    double = star.map(lambda block: block.double())
    trajectory = record_trajectory(model.double(), *data, config, double)
    result = projected_gradient_descent(model, *data, config)
    return setting, start, result, trajectory


@pytest.mark.parametrize("activation", ["tanh", "erf", "erf_plain"])
def test_every_mode_bounds_a_real_run_and_knows_more_the_more_it_looks(activation):
    for seed in range(3):
        setting, start, result, trajectory = run_of(seed, activation=activation)
        achieved = float(result.history["loss"].iloc[:-1].mean())
        found = {
            "a priori": FAST.bound(setting),
            "at initialisation": replace(FAST, mode="posterior").bound(setting, start),
            "post hoc": replace(FAST, mode="certificate").bound(setting, trajectory),
        }
        for label, bound in found.items():
            assert bound.form == "fast"
            assert achieved <= bound.average
            assert trajectory.averaged_loss <= bound.total
            assert set(bound.labels.values()) == {label}
        averages = [bound.average for bound in found.values()]
        assert averages[0] > averages[1] > averages[2]
        assert averages[2] < 4 * achieved
        assert found["post hoc"].probability == 1.0
        assert found["post hoc"].initial_loss == pytest.approx(trajectory.history["loss"].iloc[0])
        assert found["a priori"].initial_loss >= found["post hoc"].initial_loss
        papers = [
            replace(calculator, form="paper").bound(setting, evidence)
            for calculator, evidence in (
                (FAST, None),
                (replace(FAST, mode="posterior"), start),
                (replace(FAST, mode="certificate"), trajectory),
            )
        ]
        for bound in papers:
            assert bound.form == "paper"
            assert achieved <= bound.average
            assert trajectory.averaged_loss <= bound.total


def test_what_was_not_measured_at_initialisation_is_bounded():
    setting, start, *_ = run_of()
    posterior = replace(FAST, mode="posterior")
    bare = posterior.bound(setting, Start(start.initial))
    full = posterior.bound(setting, start)
    assert bare.labels["approximation"] == "a priori"
    assert bare.labels["linearisation"] == "at initialisation"
    assert full.total < bare.total
    assert full.ingredients.distance_squared == pytest.approx(start.distance**2)
    assert start.distance <= setting.transport_norms.norm
    assert bare.ingredients.distance_squared == pytest.approx(setting.transport_norms.norm**2)


def test_the_expectation_of_stochastic_runs_is_bounded():
    losses = []
    for draws in range(8):
        setting, start, _, trajectory = run_of(seed=1, batch_size=2, draws=draws)
        losses.append(float(trajectory.history["loss"].mean()))
    bound = BoundCalculator(mode="posterior", descent="ProjSGD").bound(setting, start)
    assert sum(losses) / len(losses) <= bound.average
    own = BoundCalculator(mode="certificate", descent="ProjSGD").bound(setting, trajectory)
    assert losses[-1] <= own.average
    assert own.quantity == "L_n(averaged)"


def test_evidence_must_be_of_the_mode_and_of_the_setting():
    setting, start, _, trajectory = run_of()
    with pytest.raises(TypeError, match="mode 'a priori' expected no evidence, got Start"):
        FAST.bound(setting, start)
    with pytest.raises(TypeError, match="mode 'posterior' expected a Start, got NoneType"):
        replace(FAST, mode="posterior").bound(setting)
    certificate = replace(FAST, mode="certificate")
    with pytest.raises(TypeError, match="mode 'certificate' expected a Trajectory, got Start"):
        certificate.bound(setting, start)
    for name, value in (("heads", 30), ("dimension", 4), ("steps", 49), ("step_size", 0.04)):
        with pytest.raises(ValueError, match=r"evidence: expected .*, as in the setting, got"):
            certificate.bound(replace(setting, **{name: value}), trajectory)
    with pytest.raises(ValueError, match="expected descent = ProjSGD"):
        replace(certificate, descent="ProjSGD").bound(setting, trajectory)
    with pytest.raises(ValueError, match="descent: expected ProjGD, a priori"):
        certificate.no_projection(setting, trajectory)


def test_a_start_that_the_theorem_does_not_speak_of_is_refused():
    # Independent heads start at f(phi_0) = O(1), which no term of the bound holds: with tiny norms
    # and a measured error of 0 the "bound" would be 1e-11.
    heads = independent_initialisation(
        8, 3, generator=generator(0, "unpaired"), dtype=torch.float64
    )
    with pytest.raises(ValueError, match="initial: expected the symmetric initialisation"):
        Start(heads, 0.0, 0.0)
    paired = ShallowTransformer.symmetric(8, 3, query="last", seed=0).snapshot()
    moved = paired._replace(U=paired.U + torch.arange(8)[:, None])
    with pytest.raises(ValueError, match="initial: expected the symmetric initialisation"):
        Start(moved)
    with pytest.raises(ValueError, match=r"initial: expected c_i = \+-1, got 2"):
        Start(paired._replace(c=2 * paired.c))
    Start(paired)


def test_a_transport_map_larger_than_the_setting_says_is_refused():
    # s_1 = 2/sqrt(pi) for erf_plain: v_u is longer than the nu_u that the anchors were given.
    setting, start, *_ = run_of(activation="erf_plain")
    posterior = replace(FAST, mode="posterior")
    posterior.bound(setting, start)
    for block in ("c", "U", "W"):
        size = getattr(start.norms, block)
        assert 0 < size <= getattr(setting.transport_norms, block) * (1 + 1e-6)
        small = replace(setting.transport_norms, **{block: 0.99 * size})
        with pytest.raises(ValueError, match=rf"map within transport_norms\.{block} = .* got one"):
            posterior.bound(replace(setting, transport_norms=small), start)


def test_a_measured_start_assumes_nothing_of_the_targets():
    # Targets of size 100 that no map of these norms reaches, and a setting that calls them clean:
    # the form of the paper needs sqrt(L_n) <= S, which F + Y is not.
    setting, start, *_ = run_of()
    generator_ = generator(0, "unreachable")
    tokens = unit_ball_tokens(12, 4, 3, generator=generator_)
    y = 100 * torch.randn(12, generator=generator_)
    transport = random_multi_anchor(
        3, 4, 3, generator=generator_, norms=TransportNorms(0.1, 0.1, 0.1), query="last"
    )
    measured = Start.measure(start.initial, transport, tokens, y)
    loss = float(y.double().square().mean())
    found = BoundCalculator(mode="posterior", form="paper").bound(setting, measured)
    assert found.initial_loss == pytest.approx(loss)
    assert found.ingredients.size >= math.sqrt(loss)
    assert found.average >= loss / 2  # which no run within these radii and steps leaves behind


def test_the_probability_that_nothing_is_projected_is_never_negative():
    certain = replace(SETTING, delta=0.6, delta_prime=0.6)
    assert FAST.no_projection(certain).probability == 0.0


def test_where_projection_is_excluded_it_does_not_act_and_the_stopping_time_is_the_last():
    setting, start, *_ = run_of(m=512, nu=0.05)
    wide = replace(setting, radii=Radii(1.0, 1.0, 1.0), step_size=0.001, steps=10)
    posterior = replace(FAST, mode="posterior")
    found = posterior.no_projection(wide, start)
    assert found.holds == (found.path_length <= found.limit)
    assert found.steps >= 10
    assert found.holds
    last = replace(wide, steps=found.steps)
    assert posterior.no_projection(last, start).holds
    assert not posterior.no_projection(replace(wide, steps=found.steps + 1), start).holds
    tokens = unit_ball_tokens(12, 4, 3, generator=generator(0, "t"))
    transport = random_multi_anchor(
        3, 4, 3, generator=generator(0, "a"), norms=TransportNorms(0.05, 0.05, 0.05), query="last"
    )
    y = Teacher(transport, generator=generator(0, "T"), heads=2000)(tokens)
    result = projected_gradient_descent(
        ShallowTransformer(start.initial, query="last"), tokens, y,
        DescentConfig(found.steps, step_size=0.001, radii=wide.radii),
    )  # fmt: skip
    assert result.history[["active_c", "active_U", "active_W"]].to_numpy().sum() == 0


def test_required_numbers_are_exact_at_their_neighbours():
    setting = replace(SETTING, step_size=0.01, steps=10**7)
    for calculator in (FAST, replace(PAPER, error="rms")):
        target = 2.0 * calculator.bound(replace(setting, heads=2**60)).total
        m = required_width(calculator, setting, target)
        assert m % 2 == 0
        assert calculator.bound(replace(setting, heads=m)).total <= target
        assert calculator.bound(replace(setting, heads=m - 2)).total > target
    wide = replace(setting, heads=2**40)
    tau = required_steps(FAST, wide, 0.01)
    assert FAST.bound(replace(wide, steps=tau)).total <= 0.01
    assert FAST.bound(replace(wide, steps=tau - 1)).total > 0.01
    assert required_steps(FAST, wide, 10**9) == 1
    assert required_width(FAST, setting, 10**9) == 2


@pytest.mark.parametrize("target", [1.0, 0.05])
def test_heads_and_steps_together(target):
    found = requirement(FAST, SETTING, target, kappa=0.4, share=0.6)
    assert found.bound.total <= target
    assert found.bound.kappa == pytest.approx(0.4)
    base = replace(SETTING, heads=found.heads, step_size=found.step_size, steps=found.steps)
    assert FAST.bound(base).total == found.bound.total
    assert FAST.bound(replace(base, steps=found.steps - 1)).total > target
    assert FAST.bound(replace(base, steps=10**15)).total <= 0.6 * target * (1 + 1e-6)
    narrow = replace(base, heads=found.heads - 2, steps=10**15)
    gradient = FAST.ingredients(narrow).gradient_squared
    assert FAST.bound(replace(narrow, step_size=0.4 / gradient)).total > 0.6 * target * (1 - 1e-6)
    thrifty = requirement(FAST, SETTING, target, kappa=0.4, share=0.9)
    assert thrifty.heads < found.heads
    assert thrifty.steps > found.steps


def test_heads_and_steps_grow_as_the_rates_say():
    one, tenth = (requirement(FAST, SETTING, target) for target in (0.01, 0.001))
    assert tenth.heads / one.heads == pytest.approx(10, rel=0.05)  # m ~ 1/error in the fast form
    assert tenth.steps / one.steps == pytest.approx(10, rel=0.05)  # and tau ~ 1/error


def test_the_bound_may_rise_where_the_fast_form_begins_so_a_width_is_a_crossing():
    # kappa falls below 1 between 256 and 512 heads: there the fast form starts at infinity.
    base = replace(SETTING, steps=10**5, step_size=0.085)
    before, after = (FAST.bound(replace(base, heads=m)) for m in (256, 512))
    assert (before.form, after.form) == ("paper", "fast")
    assert after.total > 100 * before.total
    for target in (100.0, 50.0):
        m = required_width(FAST, base, target)
        assert FAST.bound(replace(base, heads=m)).total <= target
        assert FAST.bound(replace(base, heads=m - 2)).total > target


def test_targets_out_of_reach_are_refused_with_what_stays():
    with pytest.raises(ValueError, match=r"target: expected a loss that 8 heads can reach"):
        required_steps(FAST, replace(SETTING, heads=8), 0.1)
    with pytest.raises(ValueError, match=r"a loss that 10 steps of 0\.02 can reach, got 0\.001"):
        required_width(FAST, replace(SETTING, steps=10), 0.001)
    with pytest.raises(ValueError, match=r"above that of the noise, got 0\.01"):
        requirement(FAST, replace(SETTING, noise=0.3), 0.01)
    with pytest.raises(ValueError, match="target: expected a finite number > 0"):
        requirement(FAST, SETTING, 0.0)
    with pytest.raises(ValueError, match=r"calculator\.form: expected 'fast', got 'paper'"):
        requirement(PAPER, SETTING, 1.0)
    with pytest.raises(ValueError, match=r"kappa: expected a number in \(0, 1\), got 1"):
        requirement(FAST, SETTING, 1.0, kappa=1.0)
    for mode in ("posterior", "certificate"):
        with pytest.raises(ValueError, match=r"calculator\.mode: expected 'a priori'"):
            required_width(replace(FAST, mode=mode), SETTING, 1.0)
    with pytest.raises(ValueError, match="expected 'a priori' or 'posterior', got 'certificate'"):
        required_steps(replace(FAST, mode="certificate"), SETTING, 1.0)
    start = Start(ShallowTransformer.symmetric(256, 8, query="last", seed=0).snapshot())
    posterior = replace(FAST, mode="posterior")
    large = 1.2 * posterior.bound(replace(SETTING, steps=10**12), start).total
    tau = required_steps(posterior, SETTING, large, start)
    assert posterior.bound(replace(SETTING, steps=tau), start).total <= large
    assert posterior.bound(replace(SETTING, steps=tau - 1), start).total > large
