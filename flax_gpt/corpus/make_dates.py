"""Writes dates.tsv: dates as people write them in English and Chinese, TAB, the ISO form. `python -m flax_gpt.corpus.make_dates [FILE]`."""

import datetime
import random
import sys
from pathlib import Path

FIRST, LAST = datetime.date(1900, 1, 1), datetime.date(2099, 12, 31)
DATES = 6000
FORMS = 2
"""Of each date; all of them share one target, so that they stand on one side of the held-out split."""

MONTHS = "January February March April May June July August September October November December".split()
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
DIGITS = "〇一二三四五六七八九"


def ordinal(day: int) -> str:
    return f"{day}{'th' if day in (11, 12, 13) else {1: 'st', 2: 'nd', 3: 'rd'}.get(day % 10, 'th')}"


def chinese(number: int) -> str:
    """1 … 99 in words: 三, 十, 十五, 二十, 三十一."""
    tens, ones = divmod(number, 10)
    return ("" if tens == 0 else "十" if tens == 1 else DIGITS[tens] + "十") + (DIGITS[ones] if ones or tens == 0 else "")


def english_forms(date: datetime.date) -> list[str]:
    month, weekday, day, year = MONTHS[date.month - 1], WEEKDAYS[date.weekday()], date.day, date.year
    return [
        f"{month} {day}, {year}",
        f"{day} {month} {year}",
        f"{month[:3]} {day}, {year}",
        f"{day:02} {month[:3]} {year}",
        f"{month} {ordinal(day)}, {year}",
        f"the {ordinal(day)} of {month} {year}",
        f"{weekday}, {month} {day}, {year}",
        f"{weekday[:3]} {day} {month[:3]} {year}",
        f"{year} {month} {day}",
    ]


def chinese_forms(date: datetime.date) -> list[str]:
    month, day, year = date.month, date.day, date.year
    digits = "".join(DIGITS[int(d)] for d in str(year))
    weekday = "一二三四五六日"[date.weekday()]
    return [
        f"{year}年{month}月{day}日",
        f"{year}年{month:02}月{day:02}日",
        f"{year}年{month}月{day}号",
        f"{digits}年{chinese(month)}月{chinese(day)}日",
        f"{digits}年{chinese(month)}月{chinese(day)}号",
        f"公元{year}年{month}月{day}日",
        f"{year}年{month}月{day}日星期{weekday}",
        f"{digits}年{chinese(month)}月{chinese(day)}日星期{weekday}",
        f"{year}/{month}/{day}",
        f"{year}.{month}.{day}",
    ]


def lines() -> list[str]:
    """The lines of the file: DATES dates drawn without replacement, FORMS forms of each, English and Chinese alike, shuffled."""
    draw = random.Random(0)
    numbers = draw.sample(range((LAST - FIRST).days + 1), DATES)
    pairs = []
    for number in numbers:
        date = FIRST + datetime.timedelta(number)
        sides = [english_forms(date), chinese_forms(date)]
        chosen: set[str] = set()
        while len(chosen) < FORMS:
            chosen.add(draw.choice(draw.choice(sides)))
        pairs += [f"{form}\t{date.isoformat()}" for form in sorted(chosen)]
    draw.shuffle(pairs)
    return pairs


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("dates.tsv")
    target.write_text("\n".join(lines()) + "\n", encoding="utf-8", newline="")
