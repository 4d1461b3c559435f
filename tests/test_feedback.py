"""Error feedback: nothing is lost for good, residuals are the clients' state, and a method knows nothing of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from test_communicator import on_ranks
from toy import Descent, Momentum, Quadratics

from hpcfed import config
from hpcfed.compressors.grid import Grid
from hpcfed.compressors.qsgd import Qsgd
from hpcfed.errors import ConfigError
from hpcfed.exchange.feedback import ErrorFeedback, Residuals
from hpcfed.federation import Federation, PerClient
from hpcfed.ranks.communicator import SerialCommunicator
from hpcfed.run.checkpoint import Checkpoint, load, save
from hpcfed.streams import Streams

CLIENTS = 5
ROUGH = [Qsgd(1), Qsgd(3, "7"), Qsgd(2, quantize_down=0, route="gather"), Grid(1)]


def mean_with(residuals, values, compressor, number=1, cohort=None):
    fed = Federation(CLIENTS, Streams(1), compressor=compressor).at(number)
    if cohort is not None:
        fed = dataclasses.replace(fed, cohort=cohort)
    kept = Residuals(residuals)
    mean = dataclasses.replace(fed, residuals=kept).mean(
        PerClient({client: values[client] for client in fed.cohort}), lossy=True
    )
    return mean, kept.merged()


@pytest.mark.parametrize("compressor", ROUGH, ids=str)
class TestWhatIsKept:
    def values(self):
        return {client: np.random.default_rng(client).standard_normal(40) for client in range(CLIENTS)}

    def test_what_was_sent_and_what_is_kept_make_up_all_there_was(self, compressor):
        """After T rounds with the same values v_i: sum of the means = T mean(v) - mean(e_T), exactly."""
        values, residuals, total = self.values(), PerClient({}), 0.0
        for number in range(1, 21):
            mean, residuals = mean_with(residuals, values, compressor, number)
            total += mean
        exact = np.mean(list(values.values()), axis=0)
        kept = np.mean(list(residuals.values()), axis=0)
        np.testing.assert_allclose(total, 20 * exact - kept, rtol=0, atol=1e-5)

    def test_residuals_stay_bounded(self, compressor):
        """So the mean over rounds comes close to the values: a contraction by delta keeps |e| below |v| / delta^2."""
        values, residuals = self.values(), PerClient({})
        sizes = []
        for number in range(1, 301):
            _, residuals = mean_with(residuals, values, compressor, number)
            sizes.append(max(np.linalg.norm(each) for each in residuals.values()))
        assert max(sizes[150:]) < 1.5 * max(sizes[:150])

    def test_a_client_that_sits_out_keeps_its_own(self, compressor):
        values = self.values()
        _, before = mean_with(PerClient({}), values, compressor)
        _, after = mean_with(before, values, compressor, 2, cohort=(1, 3))
        for client in range(CLIENTS):
            assert np.array_equal(before[client], after[client]) == (client not in (1, 3))


@pytest.mark.parametrize("method", [Descent(participants=3), Momentum()], ids=["stateless", "stateful"])
@pytest.mark.parametrize("compressor", [Qsgd(2, "9"), Grid(2)], ids=["qsgd", "grid"])
class TestMethods:
    def problem(self, compressor, comm=None):
        fed = Federation(CLIENTS, Streams(2), comm or SerialCommunicator(), compressor)
        return Quadratics(size=30).build(fed)

    def test_a_round_is_pure_and_a_checkpoint_changes_nothing(self, method, compressor, tmp_path):
        place, wrapped = self.problem(compressor), ErrorFeedback(method)
        fed = place.fed
        state = wrapped.init(fed.at(0), place.start())
        for number in (1, 2):
            state = wrapped.round(state, fed.at(number))
        kept = {client: own.tobytes() for client, own in state.residuals.items()}
        assert kept
        third = wrapped.round(state, fed.at(3))
        assert {client: own.tobytes() for client, own in state.residuals.items()} == kept
        save(tmp_path, Checkpoint(2, state, {}, {}), fed)
        loaded = load(tmp_path / "round-00000002", wrapped.state_type, fed).state
        again = wrapped.round(loaded, fed.at(3))
        assert wrapped.solution(again).tobytes() == wrapped.solution(third).tobytes()

    def test_ranks_change_no_bit(self, method, compressor):
        def three_rounds(comm):
            place, wrapped = self.problem(compressor, comm), ErrorFeedback(method)
            state = wrapped.init(place.fed.at(0), place.start())
            for number in (1, 2, 3):
                state = wrapped.round(state, place.fed.at(number))
            return wrapped.solution(state).tobytes()

        alone = three_rounds(SerialCommunicator())
        assert on_ranks(3, three_rounds) == [alone] * 3


def test_small_steps_come_nearer_with_it():
    """Gradients of unequal clients do not vanish at the minimizer. Their independent rounding errors add up to a
    distance like the root of the step; with feedback they cancel, and it is like the step itself."""
    place = Quadratics(clients=CLIENTS, size=30).build(Federation(CLIENTS, Streams(2), compressor=Qsgd(1)))
    clients = place.fed.clients.values()
    minimizer = sum(c.weight * c.target for c in clients) / sum(c.weight for c in clients)

    def distance(method):
        state = method.init(place.fed.at(0), place.start())
        for number in range(1, 1501):
            state = method.round(state, place.fed.at(number))
        return np.linalg.norm(method.solution(state) - minimizer)

    assert distance(ErrorFeedback(Descent(step=0.005))) < distance(Descent(step=0.005)) / 2


def test_it_needs_rounding():
    with pytest.raises(ConfigError, match="--error-feedback has nothing to feed back"):
        config.assemble({"workload": "logreg", "error_feedback": True})
