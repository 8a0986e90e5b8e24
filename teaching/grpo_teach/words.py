"""What `grpo check` and grading say, in English, and in Chinese where the exercise is Chinese."""

import re
from typing import Any

LEFT_OVER = "line {line} still raises NotImplementedError; take it out"
# The English words, with the values to fill in, and the same in Chinese.
CHINESE = {
    "exercise {number} is still to be written in {path}": "練習 {number} 還沒寫：{path}",
    "exercise {number}: {reason}": "練習 {number}：{reason}",
    "{kind} in {cell}, line {line}: {code}  {said}": "{cell}有 {kind}，第 {line} 行：{code}  {said}",
    "the cell of the function": "函式那一格",
    "the public cases": "公開測試那一格",
    "the cell has no function {name}": "那一格裡沒有函式 {name}",
    "the cell has no function {name}; it has {others}": "那一格裡沒有函式 {name}；有的是 {others}",
    "{count} more: the same error": "另外 {count} 個測試：同樣的錯誤",
    "exercise {number}: the public cases pass": "練習 {number}：公開測試全部通過",
    "exercise {number}: {right} of {count} public cases are right": "練習 {number}：{count} 個公開測試對了 {right} 個",
    "exercise {number}: the public cases pass ({count} of {count}; {seconds:.1f} s, grading allows {limit})": (
        "練習 {number}：公開測試全部通過（{count} 個；用了 {seconds:.1f} 秒，評分時最多 {limit} 秒）"
    ),
    "exercise {number}: {right} of {count} parts are right": "練習 {number}：{count} 個部分對了 {right} 個",
    "case {place} of {count}: {call}": "第 {place} 個測試（共 {count} 個）：{call}",
    "an error: {said}": "錯誤：{said}",
    "the cell with the public cases is not there, or is empty; take it from the course's notebook again": (
        "公開測試那一格不見了或是空的，請從課程的筆記本再複製一次"
    ),
    "the cell of the function ends with an error, before any case: {said}": "還沒開始測試，函式那一格就出錯了：{said}",
    "{name} must be written with def": "{name} 必須用 def 來寫",
    "line {line} of the public cases calls {name}; your own calls belong in another cell": (
        "公開測試那一格的第 {line} 行呼叫了 {name}；自己的呼叫請寫在別的一格"
    ),
    "only NumPy and Python's own library are there, as in grading": "這裡和評分時一樣，只有 NumPy 和 Python 標準函式庫",
    "lines with % or ! are Jupyter's own, and grading does not know them": "% 或 ! 開頭的行是 Jupyter 的，評分時不認得",
    "what the function needs must be in its own cell": "函式需要的東西，都要寫在它自己那一格裡",
    "{path} has no exercise {number}; it has {others}": "{path} 裡沒有練習 {number}；有的是 {others}",
    "all of it": "全部",
    "not written": "還沒寫",
    "not handed in": "沒有交",
    "empty: nothing was written": "空白：什麼都還沒寫",
    "not right": "不對",
    "{right} of {count} inputs right": "{count} 組輸入對了 {right} 組",
}
# Reasons that come from the process in which a function runs, and remarks on what was handed in.
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
    r"(\d+) times a calculation is in another split as well": r"有 \1 次，同一個算式也在另一個分割裡",
    r"the splits are (\S+), (\S+) and (\S+)": r"三個分割是 \1、\2 和 \3",
    r"(\d+) of (\d+) problems are kept": r"\2 題裡只留下 \1 題",
    r"(\d+) of (\d+) problems have another split in another process": r"\2 題裡有 \1 題換一個行程就換了分割",
    r"(\d+) problems to train on and (\d+) for validation, expected (\d+) and (\d+)": (
        r"訓練 \1 題、驗證 \2 題，應為 \3 與 \4 題"
    ),
    r"(\d+) problems are there twice": r"有 \1 題重複出現",
    r"(\d+) of (\d+) problems have another text or another gold": r"\2 題裡有 \1 題的題目或答案不對",
    r"repeats is not (\d+)": r"repeats 不是 \1",
    r"(\d+) conflicts, expected (\d+), sorted": r"conflicts 有 \1 個，應為 \2 個，依序排列",
    "an error without a text": "沒有訊息的錯誤",
    "another answer for the same inputs": "相同的輸入，答案卻不同",
    # What was handed in (hand_ins, submissions).
    r"its code is in (\d+) cells": r"程式碼在 \1 格裡",
    r"its cell is there (\d+) times; the one that was given counts": r"同一格出現 \1 次，以原來給的那一格為準",
    "its function is in a new cell; it belongs in the cell that was given": "函式寫在新的一格，應該寫在原來給的那一格",
    LEFT_OVER.format(line=r"(\d+)"): r"第 \1 行還有 raise NotImplementedError()，請刪掉",
    r"several versions of (.*): (.*), the newest, counts": r"\1 有好幾個版本，以最新的 \2 為準",
    r"(.*) are taken as one student's; if they are several, unpack this first": (
        r"\1 當成同一位學生的；若是好幾位學生的，請先解開"
    ),
    r"(.*) is not a notebook \((.*)\)": r"\1 不是筆記本（\2）",
    r"no notebook among (\d+) files; hand in .*": r"\1 個檔案裡沒有筆記本；請交 .ipynb，或裝著它的資料夾或 ZIP",
    r"(.*) is no notebook; hand in .*": r"\1 不是筆記本；請交 .ipynb，或裝著它的資料夾或 ZIP",
    r"(.*) is a symbolic link, which is not taken; .*": r"\1 是符號連結，不收；請交檔案本身",
    r"(.*) is a ZIP in a ZIP, and is not taken": r"\1 是 ZIP 裡的 ZIP，不收",
    r"(.*) has a password, and is not taken": r"\1 有密碼，不收",
    r"(.*) is too large, and is not taken": r"\1 太大，不收",
    r"(.*) cannot be read as a ZIP \((.*)\)": r"\1 不是能讀的 ZIP（\2）",
    r"no exercise of lesson (\d+); it has those of lesson (.*)": r"沒有第 \1 課的練習；有的是第 \2 課的",
    r"no exercise of the course": "沒有這門課的練習",
    r"(.*) \(line (\d+): (.*)\)": r"\1（第 \2 行：\3）",
}


def say(words: str, language: str, **values: Any) -> str:
    """A message in a language, with its values filled in."""
    return (CHINESE[words] if language == "zh" else words).format(**values)


def reason(text: str, language: str) -> str:
    """The reason of a failed call, in a language; the message of Python's own error stays as it is."""
    if text.startswith("NotImplementedError"):
        return say("not written", language)
    return translated(text, language)


def translated(text: str, language: str) -> str:
    """A reason or a remark of `REASONS` in a language."""
    if language == "zh":
        for pattern, chinese in REASONS.items():
            text = re.sub(pattern, chinese, text)
    return text
