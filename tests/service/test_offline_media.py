"""`LLM` with images: greedy tokens as transformers computes them, from every kind of value, alone and beside others."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from tiny_vision import write_qwen

from headrace import LLM, SamplingParams
from headrace.base.errors import MediaError, RequestError, UnsupportedFeature

pillow = pytest.importorskip("PIL.Image")
MARK = "<|vision_start|><|image_pad|><|vision_end|>"
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def picture(width: int, height: int, seed: int = 0):
    return pillow.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def png(image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_qwen(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def llm(folder):
    options = {"device": "cpu", "dtype": "float32", "threads": 1, "kv_pages": 128}
    with LLM(str(folder), limit_mm_per_prompt={"image": 3}, **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(folder):
    """Greedy tokens of transformers for a prompt and its images."""
    import torch
    from transformers import AutoImageProcessor, AutoTokenizer, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor

    class Partial(Qwen2_5_VLProcessor):
        def check_argument_for_proper_class(self, name, argument):
            return None if argument is None else super().check_argument_for_proper_class(name, argument)

    processor = Partial(
        AutoImageProcessor.from_pretrained(folder, backend="pil"), AutoTokenizer.from_pretrained(folder), None
    )
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(prompt: str, images: list) -> list[int]:
        inputs = processor(images=images or None, text=[prompt], return_tensors="pt")
        with torch.no_grad():
            made = model.generate(**inputs, do_sample=False, max_new_tokens=6, min_new_tokens=6)
        return made[0, inputs["input_ids"].shape[1] :].tolist()

    return generate


def tokens(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_prompts_with_one_image_several_and_none(llm, reference):
    a, b = picture(90, 60), picture(200, 130, 1)
    cases = [(f"see {MARK} now", [a]), (f"{MARK}x{MARK}y", [b, a]), ("only text", []), (f"see {MARK} now", [b])]
    prompts = [{"prompt": text, "multi_modal_data": {"image": images}} if images else text for text, images in cases]
    assert tokens(llm.generate(prompts, GREEDY)) == [reference(*case) for case in cases]
    llm.check()
    # once more: all of it is cached, and the same image is found while another is not taken for it
    assert tokens(llm.generate(prompts, GREEDY)) == [reference(*case) for case in cases]


def test_every_form_of_an_image(llm, reference, tmp_path):
    image = picture(90, 60)
    path = tmp_path / "a.png"
    path.write_bytes(png(image))
    values = [image, [image], np.asarray(image), str(path), path, png(image),
              "data:image/png;base64," + base64.b64encode(png(image)).decode()]
    prompts = [{"prompt": f"see {MARK} now", "multi_modal_data": {"image": value}} for value in values]
    assert tokens(llm.generate(prompts, GREEDY)) == [reference(f"see {MARK} now", [image])] * len(values)
    ids = llm.tokenizer.encode(f"see {MARK} now")
    given = {"prompt_token_ids": ids, "multi_modal_data": {"image": image}}
    assert tokens(llm.generate(given, GREEDY)) == [reference(f"see {MARK} now", [image])]


def test_chat(llm, reference):
    image = picture(90, 60)
    uri = "data:image/png;base64," + base64.b64encode(png(image)).decode()
    parts = (
        {"type": "image", "image": image}, {"type": "image_pil", "image_pil": image},
        {"type": "image_url", "image_url": {"url": uri}}, {"type": "image_url", "image_url": uri},
    )
    conversations = [[{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}] for part in parts]
    outputs = llm.chat(conversations, GREEDY)
    expected = reference(f"<|im_start|>user\n{MARK}what?<|im_end|>\n<|im_start|>assistant\n", [image])
    assert tokens(outputs) == [expected] * len(parts)
    assert outputs[0].prompt == f"<|im_start|>user\n{MARK}what?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("prompt, error, message", [
    ({"prompt": MARK, "multi_modal_data": {"image": "no-such-file.png"}}, MediaError, "cannot read"),
    ({"prompt": MARK, "multi_modal_data": {"image": b"junk"}}, MediaError, "no image"),
    ({"prompt": MARK, "multi_modal_data": {"image": 7}}, MediaError, "PIL image"),
    ({"prompt": MARK, "multi_modal_data": {"image": pillow.open(io.BytesIO(png(picture(64, 64))[:900]))}}, MediaError,
     "broken PNG image"),
    ({"prompt": "none", "multi_modal_data": {"image": picture(8, 8)}}, RequestError, "once for each"),
    ({"prompt": MARK, "multi_modal_data": {"images": 7}}, RequestError, "multi_modal_data"),
    ({"prompt": MARK, "multi_modal_data": {"audio": b"x"}}, UnsupportedFeature, "no audio"),
    ({"prompt": MARK * 4, "multi_modal_data": {"image": [picture(8, 8)] * 4}}, MediaError, "at most 3"),
    ({"prompt": MARK, "multi_modal_data": {"image": "http://127.0.0.1/a.png"}}, MediaError, "not public"),
    ({"prompt": MARK}, RequestError, "placeholders"),
])
def test_what_is_wrong(llm, prompt, error, message):
    with pytest.raises(error, match=message):
        llm.generate(prompt, GREEDY)
    llm.check()
