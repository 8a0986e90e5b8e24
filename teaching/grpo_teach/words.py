"""What `grpo check` and grading say, in English, and in Chinese where the exercise is Chinese."""

import re
from typing import Any

# The English words, with the values to fill in, and the same in Chinese.
CHINESE = {
    "exercise {number} is still to be written in {path}": "練習 {number} 還沒寫：{path}",
    "exercise {number}: {reason}": "練習 {number}：{reason}",
    "exercise {number}: {right} of {count} public cases are right": "練習 {number}：{count} 個公開測試對了 {right} 個",
    "exercise {number}: the public cases pass ({count} of {count}; {seconds:.1f} s, grading allows {limit})": (
        "練習 {number}：公開測試全部通過（{count} 個；用了 {seconds:.1f} 秒，評分時最多 {limit} 秒）"
    ),
    "exercise {number}: {right} of {count} parts are right": "練習 {number}：{count} 個部分對了 {right} 個",
    "case {place} of {count}: {call}": "第 {place} 個測試（共 {count} 個）：{call}",
    "an error": "錯誤",
    "all of it": "全部",
    "not written": "還沒寫",
    "not handed in": "沒有交",
    "empty: nothing was written": "空白：什麼都還沒寫",
    "not right": "不對",
    "{right} of {count} inputs right": "{count} 組輸入對了 {right} 組",
}
# Reasons that come from the process in which a function runs.
REASONS = {
    r"stopped after (\d+) seconds without a result": r"等了 \1 秒沒有結果，已停止",
    r"stopped after (\d+) seconds": r"計算超過 \1 秒，已停止",
    r"the function ended its process": "函式結束了自己的行程",
    r"NameError: there is no function (\w+)": r"沒有函式 \1",
    r"PermissionError: only NumPy and Python's own library are read, not (\S+)": (
        r"只能用 NumPy 和 Python 標準函式庫，不能讀 \1"
    ),
    r"PermissionError: the grader does not allow (\S+)": r"評分時不允許 \1",
    r"TypeError: a value of type (\w+) was returned": r"傳回了 \1 型別的值",
    # What a part says in place of "not right".
    r"(\d+) of (\d+) attacks earn too much": r"\2 個攻擊裡有 \1 個拿到太多獎勵",
    r"not all rewards are from 0 to 1\.1": "有的獎勵不在 0 到 1.1 之間",
    r"right above wrong in (\d+) of (\d+) pairs of honest completions": (
        r"\2 對誠實的輸出裡，只有 \1 對是答對的高於答錯的"
    ),
    r"(\d+) of (\d+) trainings have the right logits after (\d+) steps": r"\3 步之後，\2 次訓練裡有 \1 次 logits 正確",
    r"(\d+) of (\d+) bandits are learnt after (\d+) steps": r"\3 步之後，\2 個拉霸機學會了 \1 個",
    r"logits of problems with equal rewards have moved": "獎勵全都相同的題目，logits 卻變了",
    r"another scale of the reward gives other logits": "獎勵換了尺度，logits 就不同了",
    r"(\d+) of (\d+) bad runs found in time, (\d+) of (\d+) healthy ones reported": (
        r"\2 次出問題的訓練及時報了 \1 次，\4 次健康的誤報了 \3 次"
    ),
    r"the true change is inside in (\S+) of (\d+) cases, at (\S+) times the width needed": (
        r"\2 個案例裡有 \1 的區間包含真正的變化，寬度是需要的 \3 倍"
    ),
    r"(\d+) of (\d+) ends are where they must be": r"\2 個區間端點有 \1 個在該在的位置",
    "another answer for the same inputs": "相同的輸入，答案卻不同",
    r"(.*) \(line (\d+): (.*)\)": r"\1（第 \2 行：\3）",
}


def say(words: str, language: str, **values: Any) -> str:
    """A message in a language, with its values filled in."""
    return (CHINESE[words] if language == "zh" else words).format(**values)


def reason(text: str, language: str) -> str:
    """The reason of a failed call, in a language; the message of Python's own error stays as it is."""
    if text.startswith("NotImplementedError"):
        return say("not written", language)
    if language == "zh":
        for pattern, chinese in REASONS.items():
            text = re.sub(pattern, chinese, text)
    return text
