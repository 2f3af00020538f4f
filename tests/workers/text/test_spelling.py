"""Misspelled words: which letters begin no word, and what they may stand for."""

from workers.text.spelling import respellings, unknown_word


def test_letters_that_begin_no_word() -> None:
    for text, word in {
        "The people chose a new goverm": "goverm",
        "Definat": "Definat",
        "It has occure": "occure",  # the list has "occured" as a variant
        "The people chose a new govern": "",
        "of whic": "",  # closed classes are known too
        "I met Goverm": "",  # names
        "The quorvex broke. Repair the quorv": "",
        "console.goverm": "",
        "Wir haben gestern einen langen Brief bekommen, und wirkl": "",
    }.items():
        assert unknown_word(text) == word, text


def test_respellings_differ_in_one_letter_after_the_first() -> None:
    assert {"govern", "government"} < {*respellings("goverm")}
    assert {"Definitely", "Defiant"} < {*respellings("Definat")}
    assert "FRIEND" in respellings("FREIN")
    assert "until" in respellings("untill")
    assert respellings("meadowsw") == []  # a longer word
