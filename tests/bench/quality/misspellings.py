"""`misspellings`: what is predicted after misspelled words, and after names and rare words."""

from __future__ import annotations

from collections.abc import Sequence

from tests.bench.quality.keystrokes import Answer
from tests.bench.results import Row

# Common misspellings, typed until no word begins like them, and the right word.
_MISSPELLED = """There is room enough to accomo|accommodate; It is all that she had hoped to achei|achieve; The dog
barked and was rather agres|aggressive; They had a long arguem|argument; It was dull from the very begini|beginning;
That is hard to belei|believe; She runs a small buis|business; I put the date in my calende|calendar; I went to lunch
with a collegu|colleague; He spoke to the commite|committee; The plan has changed completl|completely; He fell, but he
was still concio|conscious; Yes, I shall definat|definitely; We saw the ship dissap|disappear; I did not mean to
embara|embarrass; We have to protect the envirom|environment; Nobody knew of its exista|existence; She likes to read
fori|foreign; He wrote to an old frein|friend; The people chose a new goverm|government; The prisoner was watched by a
gaur|guard; The doctor came imed|immediately; The country is independa|independent; Please do not interup|interrupt;
She has a good knowleg|knowledge; The change was hardly notica|noticeable; It was a happy ocas|occasion; Tell me when
the accident occure|occurred; She cut the cake and gave me a peic|piece; They lost all of their posess|possessions;
Your letter was recie|received; His mother was very religo|religious; I shall always rembe|remember; We keep the two
things sepe|separate; In the end the plan was succesf|successful; Her visit was a big supri|surprise; We shall meet
again tomm|tomorrow; He burnt his toun|tongue; We cannot start untill|until; The dream was very wier|weird"""
# Names and rare words, known from the text or from nowhere.
_UNKNOWN = """Mr. Przybylski came in late. We waited for Przyb; Tallowfield lies by the river. We walked to Tallowf; A
quorvex is a machine. Nobody can repair the quorv; I wrote to Anneliese Vrbova. In May Vrbo; Old Hargreaves sold the
mill, and then Hargre; Our cat Mimsel sleeps all day. At night Mims; Marigolda is a boat. I like the Marigolda; The fog
was flimmerous. It was so flimmer; Lindqvist asked me to stay. I told Lindq; We bought a kipsel, and the kips; In the
old tongue, thrane means water, and thran; My brother Aurel went to sea. Nobody has seen Aure; Thornby and Okafor
signed it. Then Okaf; The Brindlewick school is shut. Brindlew; Next week I shall travel to Szczec; My sister married a
man called Okonkw; The letter was signed by Mrs. Threlk; I met Ingeborg and her brother Thorvald; The show is over.
Hokus; The road runs from Aberystw; She named her daughter Saoirs; They drove on to Oberammerg; I know the place.
Bishopsb; We stopped for lunch at Bishopsb; I asked Mr. Wickramas; The forest is haunted by a wendig; Add a spoon of
gochuj; For breakfast there was shakshuk; It is written with asynci; Install it with kubec; The words are held in a
hashm; Please restart the webser; The bird in the hedge was a chiffch; In the pond there lives an axolot; He suffers
from gastroent; The flower is a kind of pelargon; They danced a slow mazur; The grass was full of meadowsw; He spoke in
a strange glossol; It is written in javasc"""
MISSPELLED = [tuple(each.split("|")) for each in _MISSPELLED.replace("\n", " ").split("; ")]
UNKNOWN = _UNKNOWN.replace("\n", " ").split("; ")


def misspellings_row(model: str, answers: Sequence[Answer]) -> Row:
    """Of the answers after all of MISSPELLED, then of UNKNOWN."""
    found = [answer.suggestions for answer in answers]
    return {
        "model": model,
        "silent": sum(not texts for texts in found[: len(MISSPELLED)]),
        "corrected": sum(texts == (word,) for texts, (_, word) in zip(found, MISSPELLED, strict=False)),
        "predicted": sum(bool(texts) for texts in found[len(MISSPELLED) :]),
    }
