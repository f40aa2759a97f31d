"""A model that is in memory as lm-eval asks models (extra `eval`): no export, no files. Legend: L length, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from surefoot.infer.engine import generate
from surefoot.models.decoder import Decoder
from surefoot.ops.documents import Documents


def language_model(
    model: Decoder,
    encode: Callable[[str], list[int]],
    decode: Callable[[Sequence[int]], str],
    *,
    separator: int,
    length: int,
    vocab_size: int,
    dtype: torch.dtype = torch.float32,
    new_tokens: int = 256,
) -> Any:
    """An `lm_eval.api.model.LM` to hand to `lm_eval.simple_evaluate(model=…)`.

    `separator` stands before texts without a context and ends generation; a text longer than `length` loses its beginning,
    or is read in windows where all of it is scored. `ImportError` where lm-eval is not installed.
    """
    from lm_eval.api.model import TemplateLM  # noqa: PLC0415 - an extra
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # noqa: PLC0415

    @torch.no_grad()
    def scored(context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
        """The log-probability of ids after others, and whether each is the likeliest."""
        ids = [*context, *continuation][-(length + 1) :]
        tokens_BL = torch.tensor([ids[:-1]], device=model.embedding.weight.device)
        hidden_BLD = model(tokens_BL, Documents(None, len(ids) - 1, device=tokens_BL.device), dtype=dtype)
        logits_LV: Tensor = model.logits(hidden_BLD[0, -len(continuation) :])[:, :vocab_size].float()
        wanted_L = torch.tensor(list(continuation)[-len(logits_LV) :], device=tokens_BL.device)
        picked_L = logits_LV.log_softmax(-1).gather(-1, wanted_L[:, None])
        return float(picked_L.sum()), bool((logits_LV.argmax(-1) == wanted_L).all())

    class Harness(TemplateLM):  # type: ignore[misc]
        """One request at a time: padding changes no number here, because there is none."""

        @property
        def eot_token_id(self) -> int:
            return separator

        @property
        def max_length(self) -> int:
            return length

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:  # noqa: ARG002
            return encode(string)

        def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
            return [scored(context, continuation) for _, context, continuation in requests]

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:  # noqa: ARG002
            found = []
            for request in requests:
                windows = get_rolling_token_windows(
                    token_list=encode(request.args[0]), prefix_token=separator, max_seq_len=length, context_len=1
                )
                found.append(sum(scored(*make_disjoint_window(window))[0] for window in windows))
            return found

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:  # noqa: ARG002
            return [_until(*request.args) for request in requests]

    def _until(context: str, options: dict[str, Any]) -> str:
        """Greedy text up to the first of the stops, which is left out."""
        if options.get("do_sample", False) or options.get("temperature", 0.0) > 0:
            raise ValueError(
                f"{options}: only greedy generation is the same everywhere; leave do_sample and temperature out"
            )
        stops = options.get("until") or []
        stops = [stops] if isinstance(stops, str) else stops
        num_tokens = options.get("max_gen_toks", new_tokens)
        if num_tokens >= length:
            raise ValueError(
                f"max_gen_toks {num_tokens} leaves no room for a context in {length} tokens; ask for fewer"
            )
        prompt, ids = encode(context)[-(length - num_tokens) :] or [separator], list[int]()
        for token in generate(
            model,
            prompt,
            num_tokens,
            lambda logits: logits.argmax(-1),
            dtype=dtype,
            end=separator,
            vocab_size=vocab_size,
        ):
            ids.append(token)
            if any(stop and stop in decode(ids) for stop in stops):
                break
        text = decode(ids)
        for stop in filter(None, stops):
            text = text.split(stop)[0]
        return text

    return Harness()
