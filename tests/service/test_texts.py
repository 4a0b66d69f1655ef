"""How pairs are scored by each kind of model, and the exact words of the question for yes or no."""

from __future__ import annotations

import math

import pytest

from headrace.base.errors import ContextLengthExceeded, RequestError
from headrace.base.messages import ModelFacts
from headrace.base.pooling import PoolingFacts, PoolingSpec, pack_floats, unpack_floats
from headrace.base.sampling import SamplingParams
from headrace.service.client.pooling import PoolingEncoder, activate, plan_scores, shorten
from headrace.service.client.prompts import open_request
from headrace.service.tokenization.chat_template import ChatTemplates

QWEN3 = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"""


class Words:
    """A tokenizer of characters; yes and no are tokens of their own."""

    has_chat_template = True

    def __init__(self) -> None:
        self.answers = {"yes": [1001], "no": [1002]}

    def encode(self, text: str, *, add_special_tokens: bool = True, limit: int | None = None) -> list[int]:
        ids = self.answers.get(text) or [ord(c) for c in text]
        return ids[:limit]

    def encode_within(self, text: str, most: int, *, add_special_tokens: bool = True) -> list[int] | None:
        return None if len(text) > most else self.encode(text)

    def encode_pair(self, first: str, second: str, *, limit: int | None = None) -> tuple[list[int], int]:
        return ([*map(ord, first), 0, *map(ord, second)])[:limit], len(first) + 1

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def render_chat(self, messages, **variables) -> str:
        return ChatTemplates({"default": QWEN3}, {}).render(
            messages, add_generation_prompt=True, continue_final_message=False, tools=None, template=None,
            variables=variables
        )


def facts(pooling: PoolingFacts | None, max_model_len: int = 4096) -> ModelFacts:
    return ModelFacts(16, 0, "m", "A", "f", "float32", "cpu", max_model_len, 2000, [], 0, pooling=pooling)


EMBEDDER = facts(PoolingFacts("embed", 3, needs_all_tokens=True))
CROSS = facts(
    PoolingFacts("classify", 1, needs_all_tokens=True, labels=["LABEL_0"], activation="sigmoid", takes_pairs=True)
)
JUDGE = facts(PoolingFacts("classify", 1, labels=["LABEL_0"], activation="identity"))
WRITER = facts(None)

QUESTION = (
    '<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct '
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that answer the "
    "query\n<Query>: q\n<Document>: d<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


def test_floats_travel_as_float32():
    assert unpack_floats(pack_floats([0.5, -2.0, 1e30])) == pytest.approx([0.5, -2.0, 1e30])
    assert pack_floats([1.0]) == b"\x00\x00\x80\x3f"


def test_a_writer_is_asked_in_the_words_it_was_trained_with():
    plan = plan_scores([("q", "d")], PoolingEncoder(WRITER, Words()))
    assert Words().decode(plan.inputs[0].token_ids) == QUESTION
    assert plan.inputs[0].spec == PoolingSpec(label_ids=[1001, 1002])
    assert plan.finish([pack_floats([math.log(0.6), math.log(0.2)])]) == pytest.approx([0.75])
    assert "<Instruct>: find mills\n" in Words().decode(
        plan_scores([("q", "d")], PoolingEncoder(WRITER, Words()), instruct="find mills").inputs[0].token_ids
    )


def test_a_classifier_that_takes_no_pairs_is_asked_too():
    plan = plan_scores([("q", "d")], PoolingEncoder(JUDGE, Words()))
    assert Words().decode(plan.inputs[0].token_ids) == QUESTION
    assert plan.inputs[0].spec == PoolingSpec()
    assert plan.finish([pack_floats([-3.0])]) == [-3.0]


def test_a_question_too_long_loses_the_end_of_its_document():
    plan = plan_scores([("q", "d" * 500)], PoolingEncoder.of(WRITER, Words(), len(QUESTION) + 20))
    assert Words().decode(plan.inputs[0].token_ids) == QUESTION.replace("<Document>: d", "<Document>: " + "d" * 21)


def test_a_cross_encoder_sees_both_texts():
    plan = plan_scores([("q", "ab"), ("q", "c")], PoolingEncoder(CROSS, Words()))
    assert [(Words().decode(r.token_ids), r.spec.second_start) for r in plan.inputs] == [("q\0ab", 2), ("q\0c", 2)]
    assert plan.finish([pack_floats([0.0]), pack_floats([math.log(3)])]) == pytest.approx([0.5, 0.75])


def test_embeddings_are_compared_and_each_text_read_once():
    plan = plan_scores([("q", "a"), ("q", "b"), ("q", "q")], PoolingEncoder(EMBEDDER, Words()))
    assert [Words().decode(r.token_ids) for r in plan.inputs] == ["q", "a", "b"]
    scores = plan.finish([pack_floats(v) for v in ([2.0, 0, 0], [1.0, 1, 0], [0.0, 0, 0])])
    assert scores == pytest.approx([math.sqrt(0.5), 0.0, 1.0])


def test_models_that_cannot_score_say_why():
    with pytest.raises(RequestError, match="3 classes"):
        plan_scores([("q", "d")], PoolingEncoder(facts(PoolingFacts("classify", 3)), Words()))
    with pytest.raises(RequestError, match="instruct"):
        plan_scores([("q", "d")], PoolingEncoder(CROSS, Words()), instruct="x")
    with pytest.raises(RequestError, match="tokenizer"):
        plan_scores([("q", "d")], PoolingEncoder(WRITER, None))
    split = Words()
    split.answers = {"yes": [1, 2]}
    with pytest.raises(RequestError, match="yes and no"):
        plan_scores([("q", "d")], PoolingEncoder(WRITER, split))
    bare = Words()
    bare.has_chat_template = False
    with pytest.raises(RequestError, match="chat template"):
        plan_scores([("q", "d")], PoolingEncoder(WRITER, bare))


def test_requests_and_models_of_the_wrong_kind_are_refused():
    def refused(model: ModelFacts, ids: list[int], params) -> RequestError:
        with pytest.raises(RequestError) as caught:
            open_request("r", ids, params, facts=model, tokenizer=None)
        return caught.value

    assert "/v1/embeddings" in refused(EMBEDDER, [1], SamplingParams(detokenize=False)).message
    assert "/v1/rerank" in refused(CROSS, [1], SamplingParams(detokenize=False)).message
    assert "--task embed" in refused(WRITER, [1], PoolingSpec()).message
    assert refused(EMBEDDER, [1], PoolingSpec(label_ids=[3])).param == "label_token_ids"
    assert refused(WRITER, [1], PoolingSpec(label_ids=[2000])).param == "label_token_ids"
    assert refused(EMBEDDER, [], PoolingSpec()).param == "input"
    assert refused(EMBEDDER, [2000], PoolingSpec()).param == "input"
    assert isinstance(refused(facts(EMBEDDER.pooling, 8), [1] * 9, PoolingSpec()), ContextLengthExceeded)
    requests, _ = open_request("r", [1] * 8, PoolingSpec(), facts=facts(EMBEDDER.pooling, 8), tokenizer=None)
    assert requests[0].pooling.needs_all_tokens and requests[0].stop.max_tokens == 0


@pytest.mark.parametrize(("given", "limit"), [(None, None), (-1, 4096), (7, 7)])
def test_truncation(given: int | None, limit: int | None):
    assert PoolingEncoder.of(EMBEDDER, Words(), given).limit == limit


@pytest.mark.parametrize("given", [0, -2, 4097])
def test_truncation_out_of_range(given: int):
    with pytest.raises(RequestError) as caught:
        PoolingEncoder.of(EMBEDDER, Words(), given)
    assert caught.value.param == "truncate_prompt_tokens"


def test_token_ids_are_cut_too():
    assert PoolingEncoder.of(EMBEDDER, None, 2).encode([5, 6, 7]).token_ids == [5, 6]


def test_activations_and_shorter_embeddings():
    assert activate([0.0, math.log(3)], "softmax") == pytest.approx([0.25, 0.75])
    assert activate([-800.0, 800.0], "sigmoid") == pytest.approx([0.0, 1.0])
    assert activate([1.5], "identity") == [1.5]
    assert shorten([3.0, 4.0, 9.0], 2) == pytest.approx([0.6, 0.8])
    assert shorten([3.0, 4.0], None) == [3.0, 4.0]
    with pytest.raises(RequestError, match="at most 2"):
        shorten([3.0, 4.0], 3)
