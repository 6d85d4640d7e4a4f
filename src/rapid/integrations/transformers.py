"""RAPID as a decoding method of transformers' own `generate`, with no patching.

    model.generate(**inputs, custom_generate=rapid.integrations.transformers.decoding(draft_model, draft_ids, eta=10))

`generate` prepares everything as always: its logits processors (and so its temperature, top_k, ...) and its stopping
criteria are honoured, token by token, inside a block of several accepted tokens too. The models and their
configurations are left as they are.

Two of its arguments `generate` keeps from every custom method: a `streamer` is given to `decoding` instead, and stop
strings as a stopping criterion, `StopStringCriteria(tokenizer, ["..."])`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

from rapid.decode.control import FixedDraft
from rapid.decode.loop import DecodeSettings, decode
from rapid.decode.stop import StopRule
from rapid.drafting.model import ModelDrafter
from rapid.errors import InvalidParameter
from rapid.models.hf import HFModel
from rapid.params import Law, Speculation
from rapid.sampling.verify import AcceptanceRule
from rapid.sampling.warp import check_logits

if TYPE_CHECKING:
    from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList


class ProcessorWarp:
    """transformers' logits processors as a `Warp`. They see the target's prompt for the drafter's logits too, so
    that a rule on lengths or repetitions means the same for both. Logits of a narrower head are padded to `width`."""

    def __init__(self, processors: LogitsProcessorList, prompt: torch.LongTensor, width: int, *, greedy: bool) -> None:
        self._processors = processors
        self._prompt = prompt
        self._width = width
        self.greedy = greedy

    def scores(self, logits: torch.Tensor, emitted: Sequence[int]) -> torch.Tensor:
        check_logits(logits)
        if logits.shape[-1] < self._width:
            logits = torch.nn.functional.pad(logits, (0, self._width - logits.shape[-1]), value=-torch.inf)
        if not self._processors:
            return logits
        text = torch.cat([self._prompt, torch.tensor([list(emitted)], dtype=torch.long, device=self._prompt.device)], 1)
        first = text.shape[1] - (logits.shape[0] - 1)
        rows = [
            self._processors(cast(torch.LongTensor, text[:, : first + i]), row[None].clone())
            for i, row in enumerate(logits)
        ]
        return torch.cat(rows)


def decoding(
    draft_model: PreTrainedModel,
    draft_input_ids: torch.Tensor,
    *,
    eta: float = 10.0,
    law: Law = "paper",
    alpha: float = 0.1,
    num_draft_tokens: int = 10,
    streamer: Any = None,
) -> Callable[..., Any]:
    """What to give `generate` as `custom_generate`.

    draft_model      a causal LM with the target's vocabulary; the target itself for self-speculation.
    draft_input_ids  [1, n]: the drafter's prompt, which holds the retrieved passages.
    eta, law, alpha, num_draft_tokens   as in `rapid.Speculation`; eta 0 or law `exact` is lossless.
    streamer         a transformers streamer, which is given the prompt and then every token.
    Raises `InvalidParameter` for a batch, beams or padding: one sequence at a time.
    """
    Speculation(eta=eta, law=law, alpha=alpha, num_draft_tokens=num_draft_tokens)  # validates
    draft_prompt = _one_sequence(draft_input_ids, "draft_input_ids")

    def rapid_decoding(
        model: PreTrainedModel,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        _refuse_what_cannot_be_served(generation_config, model_kwargs)
        prompt = _one_sequence(input_ids, "input_ids")
        ends = _end_ids(generation_config)
        target_model = _wrap(model, ends)
        target = target_model.new_sequence()
        drafter_model = _wrap(draft_model, ends)
        drafter_model.vocab_size = min(drafter_model.vocab_size, target_model.vocab_size)
        drafter = ModelDrafter(drafter_model.new_sequence(), draft_prompt, ends)

        def should_stop(emitted: Sequence[int]) -> bool:
            text = torch.cat([input_ids, input_ids.new_tensor([list(emitted)])], 1)
            return bool(stopping_criteria(text, None).all())

        settings = DecodeSettings(
            warp=ProcessorWarp(
                logits_processor, input_ids, target_model.vocab_size, greedy=not generation_config.do_sample
            ),
            rule=AcceptanceRule(law if eta else "exact", eta, alpha),
            controller=FixedDraft("model", num_draft_tokens),
        )
        stop = StopRule(generation_config.max_length - len(prompt), ends, should_stop)
        # A seed from the process-wide generator, so that `torch.manual_seed` governs the result as usual.
        seed = int(torch.randint(2**62, ())) if generation_config.do_sample else 0
        generator = torch.Generator().manual_seed(seed)

        if streamer is not None:
            streamer.put(input_ids.cpu())
        target.prefill(prompt[:-1])
        drafter.start()
        for round_ in decode(target, prompt, {"model": drafter}, settings, stop, generator):
            if streamer is not None:
                for token in round_.token_ids:
                    streamer.put(torch.tensor([token]))
        if streamer is not None:
            streamer.end()
        sequences = torch.cat([input_ids, input_ids.new_tensor([stop.emitted])], 1)
        return (
            GenerateDecoderOnlyOutput(sequences=cast(torch.LongTensor, sequences))
            if generation_config.return_dict_in_generate
            else sequences
        )

    return rapid_decoding


def _wrap(model: PreTrainedModel, ends: frozenset[int]) -> HFModel:
    config = model.config.get_text_config(decoder=True)
    return HFModel(
        model, name=config.name_or_path or type(model).__name__, vocab_size=config.vocab_size, eos_token_ids=ends
    )


def _one_sequence(ids: torch.Tensor, name: str) -> list[int]:
    if ids.dim() != 2 or ids.shape[0] != 1 or ids.shape[1] == 0:
        raise InvalidParameter(f"{name} must have shape [1, n], got {list(ids.shape)}; decode one sequence at a time")
    return [int(i) for i in ids[0].tolist()]


def _end_ids(generation_config: Any) -> frozenset[int]:
    ends = generation_config.eos_token_id
    return frozenset(ends if isinstance(ends, list | tuple) else [] if ends is None else [ends])


def _refuse_what_cannot_be_served(generation_config: Any, model_kwargs: dict[str, Any]) -> None:
    if (generation_config.num_beams or 1) > 1 or (generation_config.num_return_sequences or 1) > 1:
        raise InvalidParameter("RAPID decodes one sequence: set num_beams and num_return_sequences to 1")
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        raise InvalidParameter("RAPID decodes an unpadded sequence: the attention_mask has zeros")
    for wanted in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(generation_config, wanted, False):
            raise InvalidParameter(f"RAPID does not return per-step tensors: leave {wanted} off")
