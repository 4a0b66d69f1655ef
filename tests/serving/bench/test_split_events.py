"""Server-sent events out of pieces as the network cut them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.serving.bench.connection import split_events


@given(st.lists(st.binary(max_size=8).filter(lambda b: b"\n" not in b), max_size=8), st.data())
def test_events_are_whole_however_they_were_cut(datas: list[bytes], data: st.DataObject):
    stream = b"".join(b": comment\ndata: " + d + b"\n\n" for d in datas)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    pieces = [(float(end), stream[start:end]) for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    events = list(split_events(pieces))
    assert [e for _, e in events] == [d.strip() for d in datas]
    for (arrived, _), position in zip(
        events,
        (
            i for i,
            b in enumerate(stream)
            if b == 10 and stream[max(0, i - 1)] != 10 and stream[: i].rsplit(b"\n", 1)[-1].startswith(b"data:")
        ),
        strict=True
    ):
        assert arrived == min(end for end in (*cuts, len(stream)) if end > position)
