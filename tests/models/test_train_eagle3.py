"""The script that trains an EAGLE-3 head: its loss falls, and what it saves drafts in Headrace what it drafts there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draft_rig import DraftRig, load_both, write_folder
from family_cases import VOCAB, config_json, make_oracle

from benchmarks.train_eagle3 import TINY, Eagle3Head, Target, choose_ids, run, save, write_texts
from benchmarks.train_texts import write_prompts
from headrace.execution.draft_loading import DraftChoice

PLAN = replace(TINY, num_texts=48, write_batch=48, num_ids=60, batch=8, minutes=5.0, max_steps=120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    oracle = make_oracle("Llama", {"num_hidden_layers": 6})
    return write_folder(tmp_path_factory.mktemp("target"), config_json(oracle), oracle.state_dict())


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return Target.load(str(folder), torch.device("cpu"), torch.float32)


def make_prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 20, (4 + i % 5,), generator=generator).tolist() for i in range(count)]


def test_the_loss_falls_and_the_head_is_served(target: Target, folder: Path, tmp_path: Path):
    # 15 prompts and three temperatures: the text held out for measuring recurs among those trained on
    report = run(target, make_prompts(15), {2}, PLAN, tmp_path)
    assert report["steps"] == PLAN.max_steps
    assert report["last_loss"] < 0.9 * sum(report["first_losses"]) / 5
    assert report == json.loads((tmp_path / "report.json").read_text())
    survival = report["survival"]
    assert 0.05 < survival[0] <= 1 and survival == sorted(survival, reverse=True)
    _, draft = load_both(folder, DraftChoice("eagle3", str(tmp_path)))
    assert draft.groups[0].layers == [0, 1, 2, 3, 4, 5, 6], "it shares the target's pages"


@torch.no_grad()
def test_the_unrolled_head_is_the_served_one(target: Target, folder: Path, tmp_path: Path):
    """Step s of the unrolled head at position q is draft s + 1 of the chain that began at q - s, if the text is what
    the chain drafts: here the chain writes it."""
    texts = write_texts(target, make_prompts(12), replace(PLAN, num_texts=12, write_batch=12), {2})
    head = Eagle3Head(target, choose_ids(texts.ids, PLAN.num_ids, VOCAB))
    generator = torch.Generator().manual_seed(7)
    for parameter in head.parameters():
        if parameter.dim() > 1:  # as it is saved, in bfloat16
            parameter.copy_((0.3 * torch.randn(parameter.shape, generator=generator)).bfloat16().float())
    save(head, tmp_path)
    rig = DraftRig(*load_both(folder, DraftChoice("eagle3", str(tmp_path))))
    prompt = texts.ids[0, :12].tolist()
    row = rig.start(prompt)
    _, hidden = rig.step(row, 11)
    drafts = rig.propose(row, hidden[-1:], 4)
    # the text after the prompt is the chain's; the target's features end at the position where it began
    text = torch.tensor([[*prompt, *drafts]])
    features, _ = target.read(text)
    steps = [logits[0] for logits in head.unroll(text[:, 1:], features[:, :-1], 4)]
    assert [int(head.ids[steps[s][10 + s].argmax()]) for s in range(4)] == drafts


def test_texts_end_where_the_target_ends_them(target: Target):
    """Greedy answers do not depend on the padding of prompts written beside them."""
    prompts = [[5, 6, 7], [9, 10, 11, 12, 13, 14, 15]]
    plan = replace(PLAN, num_texts=6, write_batch=6, answer_len=20)
    texts = write_texts(target, [prompt for prompt in prompts for _ in range(3)], plan, {2})
    for row, prompt in ((0, prompts[0]), (3, prompts[1])):
        tokens = list(prompt)
        while len(tokens) < len(prompt) + plan.answer_len and tokens[-1] != 2:
            _, states = target.read(torch.tensor([tokens]))
            tokens.append(int((states[0, -1] @ target.head.T).argmax()))
        written = texts.ids[row].tolist()
        assert written[: len(tokens)] == tokens and set(written[len(tokens) :]) <= {-1}


def test_prompts_differ_and_recur():
    prompts = write_prompts(300, 1)
    assert prompts == write_prompts(300, 1) and len({json.dumps(p) for p in prompts}) > 280
    assert all(messages[-1]["role"] == "user" for messages in prompts)
