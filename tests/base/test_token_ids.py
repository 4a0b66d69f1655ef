"""Token ids as messages carry them."""

from __future__ import annotations

from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.messages import EngineRequest, decode_to_engine, encode
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.base.step import RowStart, StepPlan
from headrace.base.token_ids import pack_ids
from headrace.service.ranks.commands import Execute, decode_command

IDS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=300)


@given(IDS)
def test_messages_carry_them_in_four_bytes_each(ids: list[int]):
    request = EngineRequest("r", ids, SamplingSpec(), StopSpec(1))  # type: ignore[arg-type]
    message = encode(request)
    assert decode_to_engine(message) == request and request.prompt_token_ids.tolist() == ids
    assert len(message) - len(encode(EngineRequest("r", [], SamplingSpec(), StopSpec(1)))) - 4 * len(ids) in range(5)
    command = Execute(StepPlan(0, 0, [], [], [], [], starts=[RowStart(0, "r", ids, len(ids), SamplingSpec())]))
    (start,) = decode_command(encode(command)).plan.starts
    assert start.token_ids == array("i", ids)


@pytest.mark.parametrize("ids", [[2**31], [1.5], ["1"], [None]])
def test_no_other_numbers(ids: list[int]):
    with pytest.raises(TypeError):
        pack_ids(ids)


def test_other_forms_on_the_wire_are_refused():
    message = msgspec.msgpack.decode(encode(EngineRequest("r", [1, 2], SamplingSpec(), StopSpec(1))))
    for wrong in ([1, 2], b"\1\0\0", "12", 7):
        with pytest.raises(msgspec.ValidationError, match="packed int32"):
            decode_to_engine(msgspec.msgpack.encode([*message[:2], wrong, *message[3:]]))
