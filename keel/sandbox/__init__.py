"""The embedded world that shows the whole of RLHF: requests, replies, a gold reward, annotators, a small model."""

from keel.sandbox.annotators import TEMPERATURE, pairwise_accuracy, pairwise_ceiling, rank
from keel.sandbox.gold import Gold, gold, gold_score
from keel.sandbox.model import build_model
from keel.sandbox.notes import note_words, transcript
from keel.sandbox.replies import demonstration, ideal_reply
from keel.sandbox.tokenizer import train_tokenizer
from keel.sandbox.world import Request, request_from_columns, requests

__all__ = [
    "TEMPERATURE",
    "Gold",
    "Request",
    "build_model",
    "demonstration",
    "gold",
    "gold_score",
    "ideal_reply",
    "note_words",
    "pairwise_accuracy",
    "pairwise_ceiling",
    "rank",
    "request_from_columns",
    "requests",
    "train_tokenizer",
    "transcript",
]
