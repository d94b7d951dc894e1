"""What ``dynagroup check`` finds of the architectures that the installed transformers knows."""

import signal
from collections.abc import Iterator

import transformers

from benchmarks.machine import Machine
from dynagroup.integrations.check import QUESTIONS, check_model

KINDS = (
    "Apertus Bamba Bart Bert Bloom Cohere Cohere2 DeepseekV3 DebertaV2 DistilBert Electra Ernie4_5 Exaone4 Falcon "
    "FalconH1 FalconMamba Gemma Gemma2 Gemma3Text Glm4 Glm4Moe GPT2 GPTNeoX GptOss Granite GraniteMoeHybrid Jamba "
    "Llama Llama4Text M2M100 Mamba Mamba2 MBart MiniMax Mistral Mixtral ModernBert MT5 Nemotron Olmo2 Olmo3 Olmoe OPT "
    "Phi3 Phimoe Qwen2 Qwen2Moe Qwen3 Qwen3Moe Qwen3Next Qwen3_5Text RecurrentGemma Roberta SmolLM3 Starcoder2 T5 "
    "XLMRoberta XLNet"
).split()


def architectures(_machine: Machine) -> Iterator[dict[str, dict[str, str]]]:
    """The answers for each default config. A question that takes longer than a minute of CPU time is left open."""
    signal.signal(signal.SIGPROF, _late)
    found: dict[str, dict[str, str]] = {}
    for kind in KINDS:
        signal.setitimer(signal.ITIMER_PROF, 60, 60)
        try:
            found[kind] = check_model(getattr(transformers, f"{kind}Config")())
        except Exception as error:  # no small model: its own code raised
            found[kind] = dict.fromkeys(QUESTIONS, f"not known ({error!r:.100})")
        signal.setitimer(signal.ITIMER_PROF, 0)
        yield found


def _late(*_: object) -> None:
    raise TimeoutError("more than a minute")
