"""Reward of smollm2-sentiment.yaml: how positive a continuation sounds, by the VADER lexicon (Hutto, Gilbert 2014)."""

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

_ANALYZER = SentimentIntensityAnalyzer()


def sentiment(response: str) -> float:
    """VADER's compound score of the continuation alone, -1 (negative) to 1 (positive)."""
    return _ANALYZER.polarity_scores(response)["compound"]
