"""Which number a short text states as its answer, and where a long text states its answer last.

Careful graders differ in places. EXTRACTION_RULES lists what `canonical_answer` reads as an answer, with a reason for
each. `last_statement` finds the last place that states an answer at all: a line "Answer: …", a box, an answer block.

A completion that a policy is rewarded for is hostile text: nothing here raises, and no pattern sees more than the
last `LONGEST` characters.
"""

import itertools
import re
from fractions import Fraction

from grpo_lib.answers.numbers import (
    LONGEST,
    Number,
    canonical_form,
    find_numbers,
    normalize_characters,
    parse_decimal,
    strip_markup,
)
from grpo_lib.prompts import ANSWER_CLOSE, ANSWER_OPEN

# (the text, what is read, why); for people to look up, and for the tests.
EXTRACTION_RULES: tuple[tuple[str, str | None, str], ...] = (
    ("$18.00", "18", "currency, percent, units and markup are markup"),
    ("50%", "50", "a percentage is compared with a gold in percent"),
    ("2 dozen", "2", "a dozen is a unit"),
    ("1.5 million", "1500000", "a scale word changes the value; so do 20k, 1.5万 and 1.5 × 10^6"),
    ("36/2", "18", "a fraction has a value, reduced or not"),
    ("9 * 2 = 18", "18", "a calculation states what it ends in"),
    ("18 = 9 * 2", "18", "a calculation may be turned round"),
    ("9 * 2", None, "a calculation that is not worked out states nothing; nor do √324 and 10^3"),
    ("After 3 days he has 18.", "18", "a sentence states what it ends in"),
    ("18, because 9 * 2 is 18", "18", "a reason after the answer is no second answer"),
    ("not 17 but 18", "18", "a number that is rejected is no answer"),
    ("18 or 19", None, "alternatives are no answer"),
    ("17, 18", None, "a list is no answer"),
    ("17-19", None, "a range is no answer"),
    ("at least 18", None, "half a range is a range; so are more than 18, > 18 and 18+"),
    ("18 eggs and 2 hens", None, "several different numbers are no answer"),
    ("about 18", "18", "the number is stated, with a hedge; so is ~18"),
    ("not 18", None, "some other number is meant"),
    ("eighteen", None, "numbers in words are not read, in no language"),
    ("1,080", "1080", "a comma groups thousands"),
    ("1,0,80", None, "commas that do not group thousands make no number; 18,5 is none either"),
    ("1.080", "1.08", "the point is decimal"),
    ("1 080", "1080", "a space may group thousands where the groups are whole"),
    ("- 18", "-18", "a dash before the number is a minus sign, also with a space"),
    ("18 18 18", None, "the same number again and again is a list too"),
)

# How a text with several numbers says which one is the answer.
_CONCLUSION = re.compile(
    r"\b(?:so|thus|therefore|hence|answer|total|altogether|together|in all|result|resulting in|equals?|sum"
    r"|finally|in conclusion|meaning|which (?:is|means|makes|gives|leaves)|comes? to|remain(?:s|ing)?|rest is"
    r"|for a total of|now|wait|actually|correction|respuesta|quedan?|donc|reste|bleiben)\b"
    r"|,\s*(?:giving|leaving)\b|i\.e\.|(?-i:\bA:)|→|->|#{2,}"
    r"|答案|所以|因此|总共|總共|一共|共有|等于|等於|即|最终|最終|結果|结果|合计|合計|还剩|還剩|剩下|每人|平均",
    re.I,
)
_CLOSING = re.compile(r"total|altogether|together|in all|remain(?:s|ing)?|now", re.I)
_AFTER_NUMBER = re.compile(r"[0-9][^0-9,.;:=\n]*\Z")
_GOES_ON = re.compile(r"\s*(?:[,;/()−–-]|(?:of|before|after|in|for|per|from|and)\b)", re.I)
_CALCULATED = re.compile(
    r"[-+*/×÷−^]|\b(?:plus|minus|times|over|(?:add|subtract|divid|multipl)\w*)\b|\A\s*[xX]\s*\Z|加|减|減|乘|除", re.I
)
_STATES = re.compile(
    r"(?:\b(?:is|are|makes?|gives?|gets?|comes to|leaves|left with|yields|was|were|to get|be|has|have)\b"
    r"|[是为為得剩有])\W*\Z",
    re.I,
)
_HEDGING = re.compile(
    r"\b(?:or|either|maybe|perhaps|possibly|might|guess|between|somewhere|ranges?|vs|versus|neither|nor|whether)\b"
    r"|[或~]|还是|還是|之间|之間|可能|也许|也許",
    re.I,
)
_JOINED = re.compile(
    r"[;|/~→–−+*×÷^&?-]|\n"
    r"|\b(?:and|to(?=\W*\Z)|through|till|until|up|but|then|plus|minus|times|over|by|of|from|per|than|at|each|every|away|added"
    r"|subtracted|divided|multiplied|in|on|for|with|out|y|et|und|if|after|before|against|while|whereas)\b"
    r"|[和与與及到至、从從每]",
    re.I,
)
_OPENS_CLAUSE = re.compile(
    r"\s*(?:after|in|if|since|with|when|for|from|by|at|because|as|given|having|starting|out of|once|before|on)\b", re.I
)
_WORDS = re.compile(r"[^\W\d_]{2,}|[^\W\d_](?=[\s,.]|\Z)")
_BECAUSE = re.compile(
    r"\b(?:because|since)\b|[,.;\n]\s*(?:which|where|unless|assuming|explanation|reason(?:ing)?|working)\b"
    r"|因为|因為",
    re.I,
)
_TRAILING_PARENTHESIS = re.compile(r"\(([^()]*)\)\W*\Z")

# Words that change what the number next to them means.
_INVALID_PREFIX = re.compile(
    r"(?:\b(?:not|never|isn't|wasn't|cannot be|can't be|except|anything but|all but"
    r"|(?:other|more|less|fewer|greater|larger|smaller|higher|lower|bigger) than|over|above|below|under|exceeds|beyond"
    r"|at least|at most|up to|minimum of|maximum of|almost|nearly"
    r"|half of|quarter of|third of|twice|double|triple|thrice|sqrt|root of|log|ln|sin|cos|tan"
    r"|whether|no longer|no es|nicht|n'est pas|mehr als|weniger als|más de|menos de|plus de|moins de"
    r"|step|option|question|problem|choice|example|such as)\b|e\.g\.|[≠<>√±!∞^]|\+/-"
    r"|\w\s*[+*/×÷]|[不非]是|不等于|超过|超過|大于|大於|小于|小於|少于|少於|多于|多於|不到|低于|高于|至少|至多|最多|最少)"
    r"\W*(?:the\s|a\s|just\s|only\s|exactly\s|equal to\s|anything\s)*\W*\Z",
    re.I,
)
_SPOILT_AFTER = re.compile(
    r"\s*(?:\^|\*\*|±|\+/-|\+(?!\w)|π|!\s*(?=[-+*/=])|\s*[×÷+]\s*[A-Za-z(]|\s+\*\s+[A-Za-z(]"
    r"|‰|[ -]?(?:tenth|hundredth|thousandth|third|halve|fifth|eighth)s\b"
    r"|\b(?:squared|cubed|factorial|or (?:more|less|fewer|higher|lower|above|below|greater)"
    r"|and (?:above|below|over|up|under)|plus or minus)\b"
    r"|个?(?:以上|以下))",
    re.I,
)
_REFUSAL = re.compile(
    r"\b(?:can(?:no|')t (?:be )?(?:determined?|solved?|answer(?:ed)?|calculated?|found|find|tell|say|know)|unable to"
    r"|impossible|not possible|give up|(?:do not|don't) know|not enough|insufficient|no idea|no way|depends? on"
    r"|wrong to)\b|不知道|无法|無法",
    re.I,
)
_ASKS = re.compile(
    r"\s*(?:how|what|why|which|who|when|where|is|are|was|does|do|did|would|could|can|should)\b[^?]*\?\s*\Z", re.I
)
_CONDITION = re.compile(r"\s*(?:if|when|after|since|unless|suppose)\b[^,]*,(?=[^,]*[A-Za-z]{2})[^0-9]*\Z", re.I)
_BETWEEN = re.compile(
    r"\bbetween\b[^,.;0-9]{0,20}[0-9][0-9.,]*[^,.;0-9]{0,20}\band\b[^,.;0-9]{0,20}[0-9][0-9.,]*(?:\s?[ap]m\b)?", re.I
)
_TRAILER = re.compile(r"\b(?:after|by|from|when|if|in|given|before|while)\b", re.I)
_CALL = re.compile(r"[A-Za-z_]\([^()]{0,40}\Z")  # print(18): code is not run, so it states nothing
_BASED = re.compile(r"\b0[xob](?=[0-9a-f])", re.I)  # hexadecimal and the like
_REJECTED = re.compile(r"(?:\b(?:not|rather than|instead of)\s|不是)\W{0,3}\Z", re.I)
_VERB = re.compile(
    r"\b(?:is|are|was|were|be|has|have|had|will|would|becomes?|equals?|makes?|made|earn(?:s|ed)?|gets?|got|costs?|pays?|paid"
    r"|needs?|takes?|took|spen[dt]s?|sells?|sold|buys?|bought|leaves?|left|gives?|gave|saves?|saved|owes?|weighs?|uses?"
    r"|used|receives?|received|collects?|collected|reads?|eats?|ate|drives?|drove|runs?|ran|walks?|walked|works?|worked"
    r"|scores?|scored|produces?|contains?|holds?|comes?"
    r"|es|son|est|sont|ist|sind|hat|kostet|cuesta|tiene|gana|reçoit)\b|[有是为為得剩赚賺花要需用卖賣买買]",
    re.I,
)
_DIGIT = re.compile(r"[0-9]")
_VARIABLE = re.compile(r"\s*[a-z]\s*", re.I)
_MULTIPLE = re.compile(r"[0-9]\s?[xyzabnpq]\b")
_LABEL = re.compile(r"\A(?=[^:]*[^\W\d_])[^:,;\n]*:\W*\Z")
_SPACES = re.compile(r"(\s)\1{2,}")
_NUMBER_OR = re.compile(r"[^0-9]*+[0-9].*?(?:\bor\b|或|还是|還是)", re.I | re.S)
_NOT_EQUAL = re.compile(r"[<>!≠]=")
_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_PLAIN_BOX = re.compile(r"\\f?box(?:ed)?\s*\{[^{}]{0,200}\}")
_NAMED = re.compile(r"(?:[,;]|\n|\b(?:and|or)\b)\s*(?P<name>[A-Za-z][A-Za-z_ ']{0,40})\s*\Z", re.I)


def canonical_answer(text: str) -> str | None:
    """The one spelling of the number that a text states as its answer: "$1,080.00" -> "1080", "9 * 2 = 18" -> "18".

    None unless it states exactly one: for "", "?", "18 or 19", "18-19", "1,0,8", "9 * 2". EXTRACTION_RULES says
    what counts.
    """
    text = text.strip()
    if found := parse_decimal(text):
        return found
    if len(text) > LONGEST:
        text = text[-LONGEST:].lstrip("0123456789.,")  # not the rest of a numeral
        text = _SPACES.sub(r"\1\1", text)  # patterns that look for spaces before something would go over them again
    if not text:
        return None
    return canonical_form(_extract(text))


def _extract(text: str) -> Fraction | None:
    """The value that a short text states as its answer."""
    if "boxed" in text or "\\fbox" in text:
        return _boxed(text)
    text = strip_markup(text)
    if _BASED.search(text) or _REFUSAL.search(text) or _ASKS.match(text) or _CONDITION.match(text):
        return None
    text = _result(_without_aside(_without_reason(text)))  # pyright: ignore[reportAssignmentType]
    return None if text is None else _one_number(text)


def _without_reason(text: str) -> str:
    """`text` up to a reason that follows the number: "18, because 9 * 2 = 18"."""
    reason = _BECAUSE.search(text)
    if not reason or not _DIGIT.search(text[: reason.start()]) or _CONCLUSION.search(text, reason.start()):
        return text
    goes_on = text.count("=", reason.start()) > 1  # to a result of its own
    return text if goes_on else text[: reason.start()]


def _without_aside(text: str) -> str:
    """`text` without brackets at its end that explain the number before: "18 (9 * 2)", "25 (rounded from 24.6)"."""
    aside = _TRAILING_PARENTHESIS.search(text)
    explains = aside and (_CALCULATED.search(aside[1]) or len(_WORDS.findall(aside[1])) > 1)
    if not aside or not explains or _HEDGING.search(aside[1]) or not _DIGIT.search(text[: aside.start()]):
        return text
    return text[: aside.start()]


def _result(text: str) -> str | None:
    """What follows the last "=" of a calculation; None where the equations give several things their values."""
    text = _NOT_EQUAL.sub("<", text.replace("==", "=")).replace("=>", "→")
    *before, last = text.split("=")
    if not before:
        return text
    if _NUMBER_OR.match("=".join(before)):
        return None  # x = 17 or x = 18
    if _VARIABLE.fullmatch(before[-1]) and _MULTIPLE.search(last):
        return None  # x = 3y
    if not _DIGIT.search(last):  # "18 = total" states 18, "9 * 2 = ?" states nothing
        return before[0] if len(before) == 1 and _WORDS.search(last) and not _CALCULATED.search(before[0]) else None
    if len(before) == 1 and parse_decimal(before[0].strip()) and _CALCULATED.search(last) and not _WORDS.search(last):
        return before[0]  # 18 = 9 * 2
    left = parse_decimal(before[-1].strip())
    right = parse_decimal(last.strip())
    if left and right and left != right and "%" not in last:
        return None  # 17 = 18
    named = _NAMED.search(before[-1])
    if named and _DIGIT.search(before[-1]) and not _CONCLUSION.search(named["name"]):
        variables = set(re.findall(r"(?<![A-Za-z])[a-z](?![A-Za-z])", "=".join(before)))
        solved = variables == {named["name"].strip()} and all(part.strip() not in variables for part in before)
        return last if solved else None  # "3x = 27, x = 9", but not "x = 5, y = 6"
    return last


def _one_number(text: str, depth: int = 0) -> Fraction | None:
    """The one number that a plain text, without equations, states as its answer."""
    numbers = find_numbers(text)
    if not numbers:
        return None
    if len({number.value for number in numbers}) == 1:
        gaps = [text[left.end : right.start] for left, right in itertools.pairwise(numbers)]
        if any(_CALCULATED.search(gap) and not _WORDS.search(_CALCULATED.sub("", gap)) for gap in gaps):
            return None  # "2 * 2" is no way to state 2
        if len(gaps) > 1 and not any(_WORDS.search(gap) for gap in gaps):
            return None  # 18 18 18
        return _value_in_context(text, numbers[-1])
    part = _concluding_part(text, numbers) if depth < 5 else None
    if part:
        return _one_number(part, depth + 1)
    if _HEDGING.search(text):
        return None
    kept = [number for number in numbers if not _REJECTED.search(text[max(0, number.start - 20) : number.start])]
    if kept and len(kept) < len(numbers) and len({number.value for number in kept}) == 1:
        return _value_in_context(text, kept[-1])  # not 17 but 18
    return _value_in_context(text, numbers[-1]) if _ends_in_answer(text, *numbers[-2:]) else None


def _concluding_part(text: str, numbers: list[Number]) -> str | None:
    """The part of a text with several numbers that states its conclusion, where its words set one apart."""
    between = _BETWEEN.sub(" ", text)
    if between != text and _DIGIT.search(between):
        return between  # the difference between 30 and 12 is 18
    for cue in reversed(list(_CONCLUSION.finditer(text))):
        tail = text[cue.end() :]
        closes = _CLOSING.fullmatch(cue[0]) and _AFTER_NUMBER.search(text, 0, cue.start())
        if closes and _GOES_ON.match(tail) and not _VERB.search(tail):
            return text[: cue.start()]  # 18 in all, 6 each
        if _DIGIT.search(tail) and not _OPENS_CLAUSE.match(tail):
            return tail
    previous, last = numbers[-2:]
    trailer = _TRAILER.search(text, previous.end, last.start)
    if trailer and _VERB.search(text, 0, previous.start) and not _VERB.search(text, trailer.end(), last.start):
        return text[: trailer.start()]  # Tom has 17 left after giving away 3
    return None


def _ends_in_answer(text: str, previous: Number, last: Number) -> bool:
    """Whether `last` is what a calculation or sentence says, and `previous` only part of it.

    "After 3 days he has 18" is a sentence that ends in its answer; "17 apples, 18 pears" is a list.
    """
    gap = text[previous.end : last.start]
    if _STATES.search(gap) and _CALCULATED.search(text, 0, previous.end):
        return True  # 3 + 15 is 18
    if text.count(":") == 1 and _LABEL.search(gap):
        return True  # total for 5 days: $990
    if "," in gap:
        sentence = re.split(r"[.!?\n]\s", text[: previous.start])[-1]
        if _VERB.search(sentence) and not _OPENS_CLAUSE.match(sentence):
            return False
        gap = gap.rpartition(",")[2]
    return bool(_VERB.search(gap)) and not _JOINED.search(gap) and "." not in gap


def _value_in_context(text: str, number: Number) -> Fraction | None:
    """The number's value, unless the words or signs next to it make it another one: "not 18", "√18", "18²"."""
    before = text[max(0, number.start - 60) : number.start]
    spoilt = _CALL.search(before) or _INVALID_PREFIX.search(before) or _SPOILT_AFTER.match(text, number.end)
    return None if spoilt else number.value


def _boxed(text: str) -> Fraction | None:
    """The value in `\\boxed{…}`; of several boxes all must agree."""
    text = normalize_characters(text)
    boxes = find_boxes(text)
    if not boxes:
        return _extract(text.replace("boxed", "").replace("\\fbox", ""))
    values = {_extract(text[start:end]) for start, end, _ in boxes}
    inside = canonical_form(values.pop()) if len(values) == 1 else None
    if inside is None:
        return None
    before, after = strip_markup(text[: boxes[-1][2]]), strip_markup(text[boxes[-1][1] + 1 :])
    if _HEDGING.search(after) or _HEDGING.search(before[-20:]):
        return None
    position = len(before)
    whole = f"{before}{inside}{after.removeprefix('$')}"
    number = next((number for number in find_numbers(whole) if number.start <= position < number.end), None)
    return _value_in_context(whole, number) if number else None


def find_boxes(text: str) -> list[tuple[int, int, int]]:
    """(start and end of the content, start of the command) of each box that is not inside another."""
    boxes = []
    position = 0
    while command := _BOX.search(text, position):
        level = 1
        end = command.end()
        while end < len(text) and level:
            level += (text[end] == "{") - (text[end] == "}")
            end += 1
        position = end
        boxes.append((command.end(), end - (level == 0), command.start()))
    return boxes


# --- The last place that states an answer ---

MOST_CUES = 1000  # times the word "answer" is looked at, from the end; earlier ones do not count

_CUE_WINDOW = 120
_CUE = re.compile(
    r"answer[*_]{0,3}\s{0,3}(?:"
    r"(?P<line>[*_]{0,3}[:：][*_]{0,3})"
    r"|(?:to (?:the|this) (?:problem|question) )?(?:is|was|equals|(?:should|must|would) be|=)(?![a-z])"
    r"(?: (?:therefore|thus|then|simply|indeed))?\s{0,3}[:：]?)"
)
_HAN_CUE = re.compile(
    r"答案[*_]{0,3}\s{0,3}(?:(?P<line>[*_]{0,3}[:：][*_]{0,3})|(?:[应應]该?該?)?(?:[是为為]|等[于於])\s{0,3}[:：]?)"
)
_SENTENCE_END = re.compile(r"[.;?](?=\s|[*_$]{0,3}(?:\s|\Z))|[。；？]")
_DISPLAYED = {"$$": "$$", "\\[": "\\]"}
_ANYTHING_STATED = re.compile(r"[0-9$\\]")
_BEFORE_BOX = re.compile(  # what makes a box part of something larger, or one of several answers
    r"(?:[-−–+*/×÷^√<>≤≥≈±!|_]|[<>!~]=|[0-9}]\s*[,;&]|\b(?:or|nor|not|and|either|between)"
    r"|\\(?:sqrt|[dtc]?frac|binom|log|ln|sin|cos|tan|cdot|times|div|pm|mp|le|leq|ge|geq|ne|neq|lt|gt|approx|sim|cup)"
    r"|[0-9](?=[^$]*\Z))[\s$({\[]*\Z",
    re.I,
)
# No formula goes on over an arrow, the end of a block, the mark of a quotation, the bar of a table.
_BEGINS_ANEW = re.compile(
    r".*(?:[=-]>|</(?:think|thinking|thought|reasoning|p|div|li|td|th|h[1-6])>|<br ?/?>)|\s*>[> ]*\Z"
    r"|\s*\|(?: [^|]* \|)+ +\Z"
)
_TAG = re.compile(
    r"</[A-Za-z][A-Za-z0-9]{0,15}>|<(?:b|i|u|em|strong|span|p|div|center|big|code|br|li|td|mark)(?: [^<>]{0,30})?/?>"
)
_CLOSING_TAGS = re.compile(r"(?:</[A-Za-z][A-Za-z0-9]{0,15}>){1,8}\Z")
_OPENING = " \t\r\n$({["  # may stand between that and the box
_LONGEST_CONNECTION = 12  # characters
_LIST_ITEM = re.compile(r"\s*[-–*+]\s+[$*]*")
_AFTER_BOX = re.compile(
    r"[\s$)\]]*(?:[-−–+*/×÷^√<>≤≥≈±!=_]\s*[\w\\({$!]|!|[_^]|\\(?:cdot|times|div|pm|mp|sqrt|[dtc]?frac|cup|approx)"
    r"|[,;&]?\s*(?:or|and|to)\b[\s$({\[]*[-−]?(?:[0-9]|\\f?box)|[,;&][\s$({\[]*[-−]?(?:[0-9]|\\f?box)|[0-9])",
    re.I,
)
_MARKS = re.compile(r"[*_]{2,3}(?![*_])")


def last_statement(text: str) -> str | None:
    """What the last place that states an answer says, of at most `LONGEST` characters; None if there is none.

    Such places are "Answer: …" to the end of its line (or the next line, where it is empty), "the answer is …" to
    the end of the sentence, a box and the last whole answer block. The last one counts; of nested ones the outer one,
    and a box in it is opened. A place that holds too much, is not closed or is part of a larger formula states "".
    """
    lowered = text.lower()
    if len(lowered) != len(text):  # "İ" alone becomes two characters, and places would differ
        lowered = text.replace("İ", "I").lower()
    cue = _last_cue(text, lowered)
    box = max(text.rfind("\\boxed"), text.rfind("\\fbox")) if "box" in text else -1
    block, block_end = _last_block(text) if cue or "answer>" in lowered else (-1, -1)
    if block >= 0 and max(cue[0] if cue else -1, box) < block_end:
        inside = text[block + len(ANSWER_OPEN) : block_end]
        if cue and cue[0] < block and block_end <= cue[2]:  # Answer: <answer>33</answer>
            return _open_boxes(text[cue[1] : cue[2]].replace(ANSWER_OPEN, ""))
        if block > max(cue[0] if cue else -1, box):
            return _short(inside)
        return last_statement(inside) if len(inside) < len(text) else _short(inside)
    if cue and box < cue[2]:
        if 0 <= box < cue[0] < _box_end(text, box):  # \boxed{\text{Answer: } 33}
            return _boxed_text(text, box)
        return _open_boxes(text[cue[1] : cue[2]])
    return _boxed_text(text, box) if box >= 0 else None


def _last_block(text: str) -> tuple[int, int]:
    """Where the last whole answer block begins, and where its closing tag does; (-1, -1) if there is none."""
    block = text.rfind(ANSWER_OPEN, 0, max(text.rfind(ANSWER_CLOSE), 0))
    return (block, text.find(ANSWER_CLOSE, block)) if block >= 0 else (-1, -1)


def _last_cue(text: str, lowered: str) -> tuple[int, int, int] | None:
    """(start of the cue, start and end of what it states) of the last "Answer:" or "the answer is", or 答案 of both."""
    english = _last_cue_of(text, lowered, "answer", _CUE) if "answer" in lowered else None
    if "答案" not in text:
        return english
    chinese = _last_cue_of(text, text, "答案", _HAN_CUE)
    if chinese and text.find("\\boxed", chinese[1], chinese[2]) >= 0:
        return english  # the box says it
    return max(filter(None, (english, chinese)), default=None)


def _last_cue_of(text: str, lowered: str, word: str, pattern: re.Pattern[str]) -> tuple[int, int, int] | None:
    position = len(text)
    for _ in range(MOST_CUES):
        position = lowered.rfind(word, 0, position)
        if position < 0:
            return None
        cue = pattern.match(lowered, position, position + _CUE_WINDOW)
        if not cue:
            continue
        start, end = _extent(text, cue.end())
        end = _without_frame(text, position, start, end)
        if cue["line"]:
            return position, start, end
        sentence = _SENTENCE_END.search(text, start, end)
        end = sentence.start() if sentence else end
        if _ANYTHING_STATED.search(text, start, end):  # not "I hope this answer is correct"
            return position, start, end
    return None


def _without_frame(text: str, cue: int, start: int, end: int) -> int:
    """Where a statement ends that has closing HTML tags behind it, or the bar of the table in which it stands."""
    stated = text[start:end].rstrip()
    if stated.endswith(">") and (tags := _CLOSING_TAGS.search(stated)):
        return start + tags.start()
    if stated.endswith("|") and text[text.rfind("\n", 0, cue) + 1 : cue].lstrip().startswith("|"):
        return start + len(stated) - 1
    return end


def _extent(text: str, start: int) -> tuple[int, int]:
    """Start and end of the line, or displayed formula, that begins at `start` or on the next line that is not blank."""
    window = text[start : start + 2 * LONGEST]
    left = len(window) - len(window.lstrip())
    opening = window[left : left + 2]
    end = window.find("\n", left)
    if opening in _DISPLAYED:
        closed = window.find(_DISPLAYED[opening], left + 2)
        end = window.find("\n", closed) if closed > 0 else end
    end = len(window) if end < 0 else end
    tag = window.find(ANSWER_CLOSE, left, end)
    return start + left, start + (tag if tag >= 0 else end)


def _short(text: str) -> str:
    text = text.strip() if len(text) <= 2 * LONGEST else ""
    return text if len(text) <= LONGEST else ""


def _box_end(text: str, box: int) -> int:
    """Where the content of the box that begins at `box` ends; -1 if it is not closed, or too long."""
    if plain := _PLAIN_BOX.match(text, box):
        return plain.end() - 1
    window = text[box : box + 2 * LONGEST]
    boxes = find_boxes(window)
    return box + boxes[0][1] if boxes and boxes[0][2] == 0 and boxes[0][1] < len(window) else -1


def _boxed_text(text: str, box: int) -> str:
    """The content of the box that begins at `box`; "" where it is only part of an answer."""
    end = _box_end(text, box)
    if end < 0:
        return ""  # not closed: the rest was cut off
    before = text[max(0, text.rfind("\n", 0, box) + 1, box - 40) : box]
    if "box" in before and (outer := _BOX.search(before + " ")):
        before = before[outer.end() :]  # a box in a box
    after = text[end + 1 : end + 80].partition("\n")[0]
    if _goes_on_before(before) or _AFTER_BOX.match(_TAG.sub(" ", after) if "<" in after else after):
        return ""
    return _open_boxes(text[text.find("{", box) + 1 : end])


def _goes_on_before(before: str) -> bool:
    """Whether a box is part of what stands before it on its line, a formula or a list of answers."""
    if ">" in before or "|" in before:
        anew = _BEGINS_ANEW.match(before)
        before = _TAG.sub("", before[anew.end() :] if anew else before)
    if "*" in before or "_" in before:
        before = _MARKS.sub("", before)
    last = len(before.rstrip(_OPENING))
    if not last or before[last - 1] in ".:":
        return False
    goes_on = _BEFORE_BOX.search(before, max(0, last - _LONGEST_CONNECTION))
    return goes_on is not None and not _LIST_ITEM.fullmatch(before)


def _open_boxes(text: str) -> str:
    """`text` with the content of its boxes in their place; the content alone where the words around state no number."""
    text = _short(text)
    if "\\boxed" not in text and "\\fbox" not in text:
        return text
    boxes = find_boxes(text)
    contents = {text[start:end].strip() for start, end, _ in boxes}
    if len(contents) != 1:
        return ""
    start, end, command = boxes[0]
    around = text[:command] + " " + text[boxes[-1][1] + 1 :]
    alone = len(boxes) == 1 and not _DIGIT.search(around) and not _HEDGING.search(around)
    if alone and not (_BEFORE_BOX.search(_MARKS.sub("", text[:command])) or _AFTER_BOX.match(text, end + 1)):
        return _open_boxes(text[start:end])
    for start, end, command in reversed(boxes):
        text = f"{text[:command]}{text[start:end]}{text[end + 1 :]}"
    return text if "\\boxed" not in text and "\\fbox" not in text else ""
