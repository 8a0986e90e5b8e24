"""Units in Chinese after a number: 12 公分, 12元, 12 個蘋果, 12 公里/小時.

English units are all words but a few that change the number (`integers.only_a_unit`). Chinese has no spaces between
words, so units are listed here: those of measure, and the measure words, which a noun may follow. What is not
listed may change the number: 以上 is "or more", 打 a dozen, 倍 "times", 個半 "and a half", 平方 alone "squared".
"""

import re

_LENGTHS = (
    "公里|公尺|公分|公厘|千米|厘米|毫米|微米|[奈纳納]米|釐米|里|米|尺|寸|呎|吋|英里|英尺|英寸|英呎|英吋|碼|码|單位|单位"
)
_AMOUNTS = (
    "公升|毫升|升|加[侖仑]|公噸|公吨|噸|吨|公斤|千克|公克|毫克|克|斤|磅|盎司|公頃|公顷|坪|[畝亩]"
    "|小[時时]|分[鐘钟]|秒[鐘钟]?|天|日|星期|[週周]|月|年|[歲岁]|(?:攝氏|摄氏|華氏|华氏)?度|[點点]|分|℃|℉"
    "|[焦瓦]特?|千瓦|牛[頓顿]?|伏特?|安培|歐姆|欧姆|赫[茲兹]|大卡|千卡|卡路里|卡"
)
_MONEY = (
    "美元|美金|美分|[歐欧]元|港元|港[幣币]|日元|日[圓圆]|英[鎊镑]|人民[幣币]|(?:新)?[臺台][幣币]|元|[圓圆]"
    "|角|毛|塊錢|块钱"
)
_MEASURE_WORDS = (
    "[個个位名人顆颗粒隻只匹頭头條条本枚張张支枝根把輛辆台臺架艘部件間间所家座棟栋朵棵株片塊块份封首幅場场門门種种組组"
    "套排行列層层班隊队頁页題题道步段次杯瓶盒箱包袋碗盤盘桶罐籃篮枱]"
)
# Signs that, in what follows a measure word, make another number of it or state a second one.
_NOT_IN_A_NOUN = (
    "[一二三四五六七八九十](?![角邊边]|位[數数])|[對对](?!角)"
    "|[百千万萬亿億兩两零〇半幾几多少余餘倍雙双打或和與与及至到且加減减乘除是不非沒没無无未以之的比每號号內内約约近更差於于超]"
    "|方(?![形法向案程面塊块體体數数])|左右|上下|可能|也[許许]|大概"
)
_NOUN = rf"(?:不同的?)?(?:(?!{_NOT_IN_A_NOUN})[\u4e00-\u9fff]){{0,8}}"
_MEASURE = rf"(?:(?:平方|立方)?(?:{_LENGTHS})(?: ?\^ ?\{{?[23]\}}?|[²³])?|{_AMOUNTS}|{_MONEY})"
_UNIT = rf"(?:{_MEASURE}|{_MEASURE_WORDS} ?{_NOUN})"
_AFTER_A_NUMBER = re.compile(rf"(?<=[0-9a-z)}}萬万億亿]) *{_UNIT}(?: ?[/／每] ?(?:{_MEASURE}|{_MEASURE_WORDS}))?\s*\Z")
_HAN = re.compile(r"[\u4e00-\u9fff℃℉]")


def without_chinese_unit(text: str) -> str:
    """`text` without a unit in Chinese at its end: "12 公分" -> "12"; other texts stay as they are."""
    unit = None if text.isascii() else _AFTER_A_NUMBER.search(text)
    return text[: unit.start()] if unit else text


def has_chinese(text: str) -> bool:
    """Whether a text has Chinese characters."""
    return not text.isascii() and _HAN.search(text) is not None
