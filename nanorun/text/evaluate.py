"""Compression and throughput of tokenizers: what `nanorun tok eval` shows.

Compression is bytes per token: the higher, the more text a model reads in the same number of steps. It is measured on
the texts passed in and on a few short samples of other kinds, because a tokenizer that is good at English can be poor
at code or Korean. Throughput is the best of several rounds. The tokenizers alternate within a round, so that a
temporary slowdown of the machine affects all of them.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from nanorun.errors import UserError
from nanorun.hardware import usable_cores
from nanorun.text.tokenizer import Tokenizer


def evaluate_tokenizers(texts: Sequence[str], tokenizers: Sequence[Tokenizer]) -> list[dict[str, Any]]:
    """A record for each tokenizer. `kinds` has its bytes per token for each of SAMPLES."""
    size = sum(len(text.encode("utf-8", "replace")) for text in texts)
    if not size:
        raise UserError("There is no text to evaluate tokenizers on: name a dataset with validation text.")
    threads = usable_cores()
    one, many = (_time_encoding(texts, tokenizers, used) for used in (1, threads))
    reports = []
    for i, tokenizer in enumerate(tokenizers):
        tokens, offsets = tokenizer.encode_documents(texts, threads)
        roundtrip = all(
            tokenizer.decode(tokens[a:b].tolist()) == text
            for text, a, b in zip(texts, offsets[:-1], offsets[1:], strict=True)
        )
        reports.append(
            {
                "name": tokenizer.name,
                "vocab_size": tokenizer.vocab_size,
                "tokens": len(tokens),
                "bytes_per_token": size / len(tokens),
                "chars_per_token": sum(map(len, texts)) / len(tokens),
                "fertility": len(tokens)
                / max(1, sum(len(text.split()) for text in texts)),  # tokens per word
                "mb_per_s": size / one[i] / 1e6,  # on one thread
                "mb_per_s_all": size / many[i] / 1e6,  # on all of `threads`
                "threads": threads,
                "roundtrip": roundtrip,  # whether decoding returned every text exactly
                "kinds": {kind: bytes_per_token(tokenizer, [text]) for kind, text in SAMPLES.items()},
            }
        )
    return reports


def bytes_per_token(tokenizer: Tokenizer, texts: Sequence[str]) -> float:
    size = sum(len(text.encode("utf-8", "replace")) for text in texts)
    return size / max(1, len(tokenizer.encode_documents(texts)[0]))


def _time_encoding(texts: Sequence[str], tokenizers: Sequence[Tokenizer], threads: int) -> list[float]:
    """The shortest time in seconds of each tokenizer for all texts."""
    best = [float("inf")] * len(tokenizers)
    for _ in range(3):
        for i, tokenizer in enumerate(tokenizers):
            start = time.perf_counter()
            tokenizer.encode_documents(texts, threads)
            best[i] = min(best[i], time.perf_counter() - start)
    return best


SAMPLES: Mapping[str, str] = {
    "English": (
        "The harbour was quiet when the last ferry came in. Two men in oilskins threw the ropes, the ramp "
        "went down with a groan, and a single cyclist rolled out into the rain. Nobody had told her that "
        "the hotel was closed in winter, so she stood under the clock, unfolded a map that was already "
        "coming apart at the creases, and tried to remember which of the lights on the hill belonged to "
        "people she knew."
    ),
    "code": (
        "def merge(left: list[int], right: list[int]) -> list[int]:\n"
        '    """Two sorted lists become one."""\n'
        "    merged, i, j = [], 0, 0\n"
        "    while i < len(left) and j < len(right):\n"
        "        if left[i] <= right[j]:\n"
        "            merged.append(left[i])\n"
        "            i += 1\n"
        "        else:\n"
        "            merged.append(right[j])\n"
        "            j += 1\n"
        "    return merged + left[i:] + right[j:]\n"
    ),
    "maths": (
        "If 3x + 17 = 248 then x = (248 - 17) / 3 = 77. The sum 1 + 2 + ... + 2024 is 2024 * 2025 / 2 = "
        "2049300. Over 365 days at 4.75% a year, 12,500.00 grows to 13,093.75; over 10 years to 19,881.55. "
        "f(x) = x^2 - 2x + 1 = (x - 1)^2, so f'(x) = 2(x - 1) and f'(3) = 4. π ≈ 3.14159265."
    ),
    "German": (
        "Als der Zug endlich über die Brücke rollte, standen schon alle Fahrgäste mit ihren Koffern im Gang. "
        "Draußen lag die Stadt im Nebel, und nur die Türme der Kirchen ragten wie Schiffsmasten heraus."
    ),
    "French": (
        "Le boulanger ouvrait sa porte à cinq heures, bien avant que la rue ne s'éveille. L'odeur du pain "
        "chaud montait jusqu'aux fenêtres, où quelques élèves déjà levés révisaient leurs leçons."
    ),
    "Chinese": (
        "清晨的市场刚刚开门，卖菜的老人把白菜一棵一棵摆好，旁边的小孩在背昨天学的古诗。远处传来火车的汽笛声。"
    ),
    "Korean": (
        "아침 시장이 막 문을 열자 할머니는 배추를 하나씩 가지런히 놓았고, "
        "옆에서는 아이가 어제 배운 시를 외우고 있었다."
    ),
    "emoji": "Happy birthday! 🎂🎉 See you at 8 🕗 — bring the 🎸 and your 👩‍👩‍👧‍👦, it will be 🔥🔥🔥 ❤️👍🏽",
}
