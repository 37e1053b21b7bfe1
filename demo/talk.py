"""More own conversations for the demo model: memory, small tasks, reading, sums, poems, letters, honest ignorance.

Each function of Talk returns the messages of one conversation, user and assistant in turn. The text is free for any use.
"""

import random
import re

# ruff: noqa: E501  (tables of text)
# fmt: off
COUPLETS = {
    "spring": "The snow is gone, the sky is blue,/And every leaf is fresh and new.|The little birds begin to sing/To greet the green and gentle spring.",
    "summer": "The sun is high, the day is long,/The bees are humming their old song.|We run and swim and play all day/Until the light has gone away.",
    "autumn": "The leaves turn red, the leaves turn brown,/And one by one they tumble down.|The wind is cool, the nights grow long,/The last bird sings a quiet song.",
    "winter": "The world is quiet, soft, and white,/The snow came falling in the night.|We build a man with hat and nose/And come inside to warm our toes.",
    "the moon": "The moon looks in with silver light/And watches over us at night.|She sails above the sleeping trees/As softly as a summer breeze.",
    "the sun": "The sun gets up and paints the sky,/And all the birds begin to fly.|He warms the field, he warms the sea,/And sends a golden ray to me.",
    "the sea": "The waves come in, the waves go out,/The gulls fly up and turn about.|I find a shell upon the sand/And hold the ocean in my hand.",
    "rain": "The rain is tapping on the pane,/I love the music of the rain.|It fills the brook, it feeds the tree,/And makes a puddle just for me.",
    "snow": "The snow falls softly through the air/And leaves a blanket everywhere.|The trees are white, the roofs are too,/And all the world is clean and new.",
    "a cat": "My little cat is soft and gray,/She sleeps through almost all the day.|But when the moon is in the sky,/She hunts the shadows passing by.",
    "a dog": "My dog is always glad to see/His best friend coming home: that's me!|He wags his tail, he brings his ball,/And thinks he is the best of all.",
    "a tree": "The old tree stands beside the lane/And drinks the sunshine and the rain.|Its branches hold a robin's nest,/And in its shade the travelers rest.",
    "stars": "The stars are lamps, so far, so bright,/They keep me company at night.|I count them slowly, one by one,/And fall asleep before I'm done.",
    "friendship": "A friend is someone kind and true/Who laughs and cries along with you.|When days are dark and skies are gray,/A friend can chase the clouds away.",
    "a river": "The river sings, the river flows,/And no one asks it where it goes.|It leaves the hill, it finds the sea,/And tells its story all for free.",
    "books": "A book is like an open door/To places never seen before.|I turn the page, and off I go/To lands of sun and lands of snow.",
}
POEMS_ZH = {
    "春天": "春风轻轻吹过来，|小草绿了花儿开。|燕子飞回屋檐下，|孩子笑着跑出来。",
    "夏天": "太阳高高挂天上，|知了树上把歌唱。|荷花开在池塘里，|青蛙跳进水中央。",
    "秋天": "秋风吹过小山坡，|树叶红了真不错。|果园里面苹果香，|大雁排队唱着歌。",
    "冬天": "雪花飘飘落下来，|房子树木都变白。|我和朋友堆雪人，|雪人笑着等春来。",
    "月亮": "月亮弯弯像小船，|挂在天上真好看。|星星围着它眨眼，|陪我慢慢入梦甜。",
    "雨": "小雨小雨沙沙沙，|唱着歌儿到我家。|小树喝得长高了，|花儿喝得笑哈哈。",
    "大海": "大海大海蓝又宽，|浪花朵朵跳上岸。|我在沙滩捡贝壳，|听见大海在呼唤。",
    "小猫": "小猫小猫爱睡觉，|太阳晒着眯眯笑。|晚上睁开圆眼睛，|捉住老鼠喵喵叫。",
    "妈妈": "妈妈妈妈我爱你，|每天陪我做游戏。|冬天给我盖被子，|夏天为我扇凉意。",
    "老师": "老师老师您真好，|教我读书又画画。|像那春天的阳光，|照着小苗慢慢长。",
}
UNKNOWN = [
    "Who is the president of {country}?", "How many people live in {city}?", "How many people live in {country}?", "When was {person} born?",
    "Who won the football match between {country} and {country2}?", "What is the weather in {city} right now?", "How far is it from {city} to {city2}?",
    "How much does a ticket to {city} cost?", "What is the phone number of {person}?", "Who wrote the book \"The {adj} {noun}\"?", "What happened in {year}?",
    "What is the history of {city}?", "What is the price of a {noun} in {country}?", "Explain quantum physics.", "How does a nuclear reactor work?",
    "Solve the equation x^{small} + {small}x = {year}.", "What is the square root of {year}?", "What is {year} times {big}?", "Who is {person} {surname}?",
    "Tell me about {person} {surname}.", "What do you think about politics?", "Who will win the next election?", "What is the stock price today?", "What time is it?",
    "What day is it today?", "Where am I?", "What did I do yesterday?", "Can you open a web page for me?", "Can you book a hotel in {city}?", "Send an email to {person}.",
    "What is the latest news?", "Write a paper about {country} in {year}.", "How can I invest my money?", "Which medicine should I take?", "Prove that there are infinitely many primes.",
    "What is the capital of the {adj} kingdom?", "Translate this into French: {noun}.", "How do you say {noun} in German?", "Summarize the history of {country}.",
]  # fmt: skip
UNKNOWN_ZH = [
    "{country}的总统是谁？", "{city}有多少人口？", "{person}是什么时候出生的？", "{city}现在天气怎么样？", "从{city}到{city2}有多远？", "{year}年发生了什么事？", "请介绍{city}的历史。",
    "去{city}的机票多少钱？", "{person}的电话号码是多少？", "请解释量子力学。", "核反应堆是怎么工作的？", "{year}的平方根是多少？", "{year}乘以{big}等于多少？", "今天的新闻是什么？", "现在几点了？",
    "今天星期几？", "我昨天做了什么？", "谁会赢得比赛？", "我应该买什么股票？", "我该吃什么药？", "把“{noun}”翻译成法语。", "请帮我订一家{city}的酒店。",
]  # fmt: skip
DONT_KNOW = [
    "I am sorry, I do not know that. I am only a very small model.",
    "I do not know. I am a tiny model and know only simple things.",
    "Sorry, that is too hard for me. I am a very small demo model.",
]
DONT_KNOW_ZH = ["对不起，这个我不知道。我只是一个很小的模型。", "我不知道。我是一个小小的演示模型，只懂简单的事情。", "抱歉，这个问题对我来说太难了。"]
SURNAMES = ["Smith", "Brown", "Miller", "Wilson", "Taylor", "Clark", "Lewis", "Young", "King", "Green"]
REASONS = [("I am sick", "I will stay in bed today"), ("I have a cold", "I need to rest at home"), ("I missed the bus", "I will be late"),
           ("my mother is ill", "I must help her at home"), ("we are going on a trip", "I will be away for a week"), ("I have to see the dentist", "I will come in the afternoon")]  # fmt: skip
THANKS = ["the book", "the gift", "your help", "the kind letter", "the flowers", "the cake", "the lovely dinner"]
VERBS = [("has", "have"), ("bought", "buy"), ("found", "find"), ("lost", "lose"), ("likes", "like"), ("wants", "want"), ("drew", "draw")]

# fmt: on


def first_upper(text: str) -> str:
    return text[0].upper() + text[1:]


class Talk:
    """chat, tales: the generators' modules of questions and of stories; pairs: the generator of sentence pairs."""

    def __init__(self, rng: random.Random, chat, tales, pairs):
        self.rng, self.chat, self.tales, self.pairs = rng, chat, tales, pairs
        self.people = tales.GIRLS + tales.BOYS
        self.kinds = [
            (self.memory, 6), (self.tale, 5), (self.facts, 3), (self.sum, 5), (self.task, 4), (self.reading, 4),
            (self.reading_zh, 2), (self.poem, 2), (self.letter, 1), (self.unknown, 3), (self.several, 3),
        ]  # fmt: skip

    def conversation(self) -> list:
        kinds, weights = zip(*self.kinds, strict=True)
        messages = self.rng.choices(kinds, weights)[0]()
        if self.rng.random() < 0.12 and sum(map(len, messages)) < 400:
            messages = messages + self.rng.choices(kinds, weights)[0]()
        if self.rng.random() < 0.06 and sum(map(len, messages)) < 600:
            messages = messages + self.rng.choice(
                [
                    ["Thank you!", "You are welcome!"],
                    ["谢谢！", "不客气！"],
                    ["Thanks, bye!", "Goodbye! Have a nice day."],
                ]
            )
        return messages

    def facts(self) -> list:
        """One to three exchanges of the generator of questions."""
        out = []
        for _ in range(self.rng.randint(1, 3)):
            out += self.chat.turn(self.rng, "en" if self.rng.random() < 0.6 else "zh", self.pairs)
        return out

    def several(self) -> list:
        """The translation of two or three sentences at once."""
        rng = self.rng
        rows = [self.pairs.pair() for _ in range(rng.randint(2, 3))]
        english, chinese = " ".join(e for e, _ in rows), "".join(z for _, z in rows)
        if rng.random() < 0.5:
            return [
                rng.choice(["Translate into Chinese: ", "把下面的句子翻译成中文：", "Please translate into Chinese:\n"])
                + english,
                chinese,
            ]
        return [
            rng.choice(["Translate into English: ", "把下面的句子翻译成英文：", "Please translate into English:\n"]) + chinese,
            english,
        ]

    def sum(self) -> list:
        rng, out = self.rng, []
        chinese = rng.random() < 0.3
        for _ in range(rng.randint(1, 2)):
            kind, most = rng.random(), rng.choice((10, 10, 20, 50))
            if kind < 0.45:
                a, b = rng.randint(0, most), rng.randint(0, most)
                sign, word, zh, answer = "+", "plus", "加", a + b
            elif kind < 0.75:
                a, b = sorted((rng.randint(0, most), rng.randint(0, most)), reverse=True)
                sign, word, zh, answer = "-", "minus", "减", a - b
            else:
                a, b = rng.randint(0, 10), rng.randint(0, 10)
                sign, word, zh, answer = rng.choice("*x×"), "times", "乘以", a * b
            if rng.random() < 0.25 and sign in "+-":
                name, thing = (
                    rng.choice(self.people),
                    rng.choice(["apples", "books", "pencils", "balls", "cookies", "eggs", "toys", "stones"]),
                )
                if sign == "+":
                    out += [
                        f"{name} has {a} {thing}. {rng.choice(self.people)} gives {name} {b} more. How many {thing} does {name} have now?",
                        f"{a} + {b} = {answer}. {name} has {answer} {thing} now.",
                    ]
                else:
                    out += [
                        f"{name} has {a} {thing}. {name} {rng.choice(['loses', 'gives away', 'sells'])} {b} of them. How many {thing} are left?",
                        f"{a} - {b} = {answer}. There are {answer} {thing} left.",
                    ]
                continue
            if chinese:
                out += rng.choice(
                    [
                        [f"{a}{zh}{b}等于多少？", f"{a}{zh}{b}等于{answer}。"],
                        [f"{a}{zh}{b}等于几？", f"{a}{zh}{b}等于{answer}。"],
                        [f"{a} {sign} {b} = ?", f"{a} {sign} {b} = {answer}"],
                        [f"{a}{sign}{b}等于多少？", f"{a} {sign} {b} = {answer}"],
                    ]
                )
            else:
                out += rng.choice([[f"What is {a} {sign} {b}?", f"{a} {sign} {b} = {answer}"], [f"{a} {sign} {b} = ?", f"{a} {sign} {b} = {answer}"], [f"{a}{sign}{b}", f"{a} {sign} {b} = {answer}"],
                                   [f"{a}{sign}{b}=", f"{a} {sign} {b} = {answer}"], [f"What is {a} {word} {b}?", f"{a} {word} {b} is {answer}."], [f"How much is {a} {word} {b}?", f"{a} {word} {b} is {answer}."]])  # fmt: skip
        return out

    def task(self) -> list:
        """Copying, counting, sorting: things that need the exact words of the user."""
        rng = self.rng
        kind = rng.randrange(10)
        words = rng.sample(self.chat.SPELL, rng.randint(2, 5))
        english, chinese = self.pairs.pair()
        if kind == 0:
            return [
                rng.choice(["Repeat after me: ", "Say this: ", "Please repeat: ", "Repeat this sentence: "]) + english,
                english,
            ]
        if kind == 1:
            return [rng.choice(["请跟我说：", "重复这句话：", "请重复："]) + chinese, chinese]
        if kind == 2:
            numbers = rng.sample(range(1, 60), rng.randint(3, 5))
            down = rng.random() < 0.3
            ask = (
                "Sort these numbers from large to small: "
                if down
                else rng.choice(["Sort these numbers: ", "Put these numbers in order: "])
            )
            return [ask + ", ".join(map(str, numbers)), ", ".join(map(str, sorted(numbers, reverse=down)))]
        if kind == 3:
            return [
                rng.choice(["Reverse this list: ", "Write these words in reverse order: "]) + ", ".join(words),
                ", ".join(words[::-1]),
            ]
        if kind == 4:
            return [
                f"How many words are in this list: {', '.join(words)}?",
                f"There are {self.chat.NUMW[len(words)]} words in the list.",
            ]
        if kind == 5:
            which = rng.random() < 0.5
            return [
                f"What is the {'first' if which else 'last'} word of this list: {', '.join(words)}?",
                f"The {'first' if which else 'last'} word is {words[0 if which else -1]}.",
            ]
        if kind == 6:
            word = words[0]
            which = rng.random() < 0.5
            return [
                f"What is the {'first' if which else 'last'} letter of the word {word}?",
                f"The {'first' if which else 'last'} letter of {word} is {word[0 if which else -1].upper()}.",
            ]
        if kind == 7:
            word, times = words[0], rng.randint(2, 5)
            return [f"Say {word} {self.chat.NUMW[times]} times.", first_upper(", ".join([word] * times)) + "."]
        if kind == 8:
            numbers = rng.sample(range(1, 100), 3)
            large = rng.random() < 0.5
            return [
                f"Which number is the {'largest' if large else 'smallest'}: {numbers[0]}, {numbers[1]}, or {numbers[2]}?",
                f"{max(numbers) if large else min(numbers)} is the {'largest' if large else 'smallest'}.",
            ]
        group = rng.choice(list(self.chat.CATS))
        count = rng.randint(2, 5)
        chosen = rng.sample(self.chat.CATS[group], min(count, len(self.chat.CATS[group])))
        return [
            f"Make a list of {self.chat.NUMW[len(chosen)]} {group}.",
            "\n".join(f"{n}. {first_upper(x)}" for n, x in enumerate(chosen, 1)),
        ]

    def reading(self) -> list:
        """Two to four small facts about people, then questions about them."""
        rng = self.rng
        names = rng.sample(self.people, rng.randint(2, 4))
        place = rng.random() < 0.4
        if place:
            things = rng.sample(
                [
                    "the park",
                    "the library",
                    "the kitchen",
                    "the garden",
                    "the school",
                    "the market",
                    "the beach",
                    "the zoo",
                    "the station",
                    "the shop",
                ],
                len(names),
            )
            verb = rng.choice(["is in", "went to"])
            lines = [f"{n} {verb} {t}." for n, t in zip(names, things, strict=True)]
        else:
            past, base = rng.choice(VERBS)
            things = rng.sample([f"{c} {t}" for c in self.tales.COL for t in self.tales.SMALLTHING], len(names))
            lines = [f"{n} {past} {self.tales.art(t)}." for n, t in zip(names, things, strict=True)]
        out, begin = [], " ".join(lines)
        for n, pick in enumerate(rng.sample(range(len(names)), rng.randint(1, 2))):
            name, thing = names[pick], things[pick]
            if place:
                ask, answer = (
                    (f"Where is {name}?", f"{name} is in {thing}.")
                    if verb == "is in"
                    else (f"Where did {name} go?", f"{name} went to {thing}.")
                )
                if rng.random() < 0.4:
                    ask, answer = (f"Who {verb} {thing}?", f"{name} {verb} {thing}.")
            elif rng.random() < 0.5:
                ask, answer = f"Who {past} the {thing}?", f"{name} {past} the {thing}."
            else:
                does = "does" if past in ("has", "likes", "wants") else "did"
                ask, answer = f"What {does} {name} {base}?", f"{name} {past} {self.tales.art(thing)}."
            out += [f"{begin}{rng.choice([' ', chr(10)])}{ask}" if n == 0 else ask, answer]
        return out

    def reading_zh(self) -> list:
        rng = self.rng
        names = rng.sample(self.chat.ZNAME, rng.randint(2, 4))
        place = rng.random() < 0.4
        if place:
            things = rng.sample(["公园", "图书馆", "厨房", "花园", "学校", "市场", "海边", "动物园", "商店"], len(names))
            lines = [f"{n}在{t}" for n, t in zip(names, things, strict=True)]
        else:
            things = rng.sample(
                [
                    "红色的球",
                    "蓝色的风筝",
                    "黄色的帽子",
                    "新书包",
                    "小木船",
                    "绿色的铅笔",
                    "白色的杯子",
                    "旧地图",
                    "漂亮的花",
                    "大蛋糕",
                ],
                len(names),
            )
            lines = [f"{n}有一个{t}" for n, t in zip(names, things, strict=True)]
        pick = rng.randrange(len(names))
        name, thing = names[pick], things[pick]
        if place:
            ask, answer = rng.choice([(f"{name}在哪里？", f"{name}在{thing}。"), (f"谁在{thing}？", f"{name}在{thing}。")])
        else:
            ask, answer = rng.choice([(f"谁有{thing}？", f"{name}有{thing}。"), (f"{name}有什么？", f"{name}有一个{thing}。")])
        return ["，".join(lines) + "。" + ask, answer]

    def poem(self) -> list:
        rng = self.rng
        if rng.random() < 0.35:
            about = rng.choice(list(POEMS_ZH))
            return [
                rng.choice(["写一首关于{}的诗。", "写一首{}的小诗。", "请写一首关于{}的短诗。", "以{}为题写一首诗。"]).format(
                    about
                ),
                POEMS_ZH[about].replace("|", "\n"),
            ]
        about = rng.choice(list(COUPLETS))
        couplets = COUPLETS[about].split("|")
        if rng.random() < 0.3:
            couplets = couplets[::-1]
        ask = rng.choice(
            [
                "Write a poem about {}.",
                "Write a short poem about {}.",
                "Can you write a poem about {}?",
                "A poem about {}, please.",
                "Write me a little rhyme about {}.",
            ]
        )
        return [ask.format(about), "\n".join(couplets).replace("/", "\n")]

    def letter(self) -> list:
        rng = self.rng
        name, friend = rng.sample(self.people, 2)
        if rng.random() < 0.5:
            reason, result = rng.choice(REASONS)
            ask = f"Write a short {rng.choice(['letter', 'email', 'message'])} to my teacher. Say that {reason}."
            return [
                ask,
                f"Dear teacher,\nI am writing to tell you that {reason}. {first_upper(result)}. Thank you for your understanding.\nBest wishes,\n{name}"
                if rng.random() < 0.5
                else f"Dear teacher,\nI am sorry, but {reason}. {first_upper(result)}.\nKind regards",
            ]
        thing = rng.choice(THANKS)
        return [
            f"Write a short thank-you letter to {friend} for {thing}.",
            f"Dear {friend},\nThank you very much for {thing}. It made me very happy. I hope to see you soon.\nBest wishes",
        ]

    def unknown(self) -> list:
        """Questions beyond the model, with an honest answer."""
        rng, lines = self.rng, [line.split("|") for line in self.chat.CAP]
        chinese = rng.random() < 0.35
        one, two = rng.sample(lines, 2)
        values = {
            "country": one[2] if chinese else one[0],
            "country2": two[0],
            "city": one[3] if chinese else one[1],
            "city2": two[3] if chinese else two[1],
            "person": rng.choice(self.chat.ZNAME if chinese else self.people),
            "surname": rng.choice(SURNAMES),
            "noun": rng.choice(["猫", "房子", "太阳", "书"]) if chinese else rng.choice(self.chat.SPELL),
            "adj": rng.choice(self.tales.KIDADJ),
            "year": rng.randint(1200, 2040),
            "big": rng.randint(101, 999),
            "small": rng.randint(2, 9),
        }
        ask = rng.choice(UNKNOWN_ZH if chinese else UNKNOWN).format(**values)
        return [ask, rng.choice(DONT_KNOW_ZH if chinese else DONT_KNOW)]

    def tale(self) -> list:
        """A story about something that the user names, or one that goes on from the user's beginning."""
        rng = self.rng
        if rng.random() < 0.35:
            text = self.chat.zh_story(rng)
            heroes = [h for h in self.chat.ZNAME + self.chat.ZAN if h in text]
            hero = min(heroes, key=text.index) if heroes else "好朋友"
            asks = [
                "讲一个关于{}的故事。",
                "给我讲一个{}的故事。",
                "写一个关于{}的小故事。",
                "我想听{}的故事。",
                "请讲一个关于{}的短故事。",
            ]
            return [rng.choice(asks).format(hero), text]
        _, spec, text = self.tales.story(rng)
        v = spec.v
        art = self.tales.art
        kind = v["ak"] if v["ak"] in text else "child"
        things = [x for x in (v["thing"], v["tree"] + " tree", v["food"], v["place"]) if x in text]
        thing = rng.choice(things) if things else v["a"]
        thing = thing if thing in (v["food"], v["a"]) or thing.startswith("the ") else art(thing)
        if rng.random() < 0.2:  # the user gives the beginning
            cut = text.find(". ") + 1
            if 0 < cut < 200:
                ask = rng.choice(["Continue this story:", "Go on with this story:", "Finish the story:", "Continue the story."])
                return [f"{ask} {text[:cut]}", text[cut + 1 :]]
        asks = [
            f"Tell me a story about {art(kind)}.", f"Tell me a short story about {art(kind)}.", f"Write a story about {art(kind)}.", f"A story about {art(kind)}, please.",
            f"Write a short story about {art(kind)} and {thing}.", f"Tell me a story about {thing}.", f"Can you tell me a story about {art(kind)}?",
            f"Tell me a bedtime story about {art(kind)}.", f"Write a story with {v['a']} in it.", f"Write a short story about {art(kind)} named {v['a']}.",
        ]  # fmt: skip
        out = [rng.choice(asks), text]
        if v["a"] in text and rng.random() < 0.3:
            out += [
                rng.choice(["Who is the story about?", "What is the name of the hero?"]),
                f"The story is about {v['a']}.",
            ]
        return out

    def memory(self) -> list:
        """The user says something about himself and asks for it later."""
        rng, chat = self.rng, self.chat
        chinese = rng.random() < 0.4
        facts = self.facts_zh() if chinese else self.facts_en()
        chosen = rng.sample(facts, rng.randint(1, 3))
        if rng.random() < 0.5 and facts[0] not in chosen:
            chosen.insert(0, facts[0])
        out, rest = [], chosen
        if len(chosen) > 1 and rng.random() < 0.35:  # two facts in one message
            (tell, reply, _, _, one), (tell2, _, _, _, two) = chosen[:2]
            second = re.sub(r"^(Hello! |Hi, |Hello, |你好！|你好，)", "", rng.choice(tell2).format(two))
            join = "" if chinese else " "
            first = rng.choice(tell).format(one)
            if not chinese and rng.random() < 0.3 and not second.startswith("Hello"):
                first, join, second = (
                    first[:-1],
                    " and ",
                    second if second[0] == "I" else second[0].lower() + second[1:],
                )
            out += [
                first + join + first_upper(second) if join != " and " else first + join + second,
                first_upper(rng.choice(reply).format(one)),
            ]
            rest = chosen[2:]
        for tell, reply, _, _, value in rest:
            out += [rng.choice(tell).format(value), first_upper(rng.choice(reply).format(value))]
        for _ in range(rng.choice((0, 0, 1, 1, 2))):
            question, answer = chat.turn(rng, "zh" if chinese else "en", self.pairs)
            if len(answer) < 400 and len(question) < 300:
                out += [question, answer]
        rng.shuffle(chosen)
        for _, _, ask, answer, value in chosen[: rng.randint(1, len(chosen))]:
            out += [rng.choice(ask), first_upper(rng.choice(answer).format(value))]
        return out

    def facts_en(self) -> list:
        """Rows of (what the user says, replies, questions, answers, value)."""
        rng = self.rng
        pet = rng.choice(["cat", "dog", "rabbit", "bird", "turtle", "hamster", "fish"])
        kin = rng.choice(["sister", "brother", "best friend", "teacher", "mother", "father"])
        foods = ["pizza", "noodles", "soup", "rice", "cake", "bread", "dumplings", *self.chat.CATS["fruits"]]
        hobby = rng.choice(
            [
                "swimming",
                "running",
                "dancing",
                "singing",
                "cooking",
                "reading",
                "painting",
                "football",
                "tennis",
                "chess",
                "music",
            ]
        )
        job = rng.choice(
            ["teacher", "doctor", "student", "nurse", "driver", "farmer", "cook", "writer", "singer", "programmer"]
        )
        pet_name = rng.choice([n for group in self.tales.ANIM.values() for n in group])
        return [
            (["My name is {0}.", "I am {0}.", "Hi, my name is {0}.", "Hello! I am {0}.", "Hello, my name is {0}.", "I'm {0}.", "Hi, I'm {0}."],
             ["Nice to meet you, {0}!", "Hello, {0}! How can I help you?", "Hi {0}! It is nice to meet you."],
             ["What is my name?", "Do you know my name?", "Do you remember my name?", "Who am I?"],
             ["Your name is {0}.", "You are {0}."], rng.choice(self.people)),
            (["My favorite color is {0}.", "I like the color {0}.", "I like {0}."],
             ["{0} is a beautiful color!", "I like {0} too."],
             ["What is my favorite color?", "Which color do I like?"],
             ["Your favorite color is {0}.", "You like {0}."], rng.choice(self.chat.COLORS)[1]),
            (["I live in {0}.", "I am from {0}.", "I come from {0}."],
             ["{0} is a nice place!", "I have heard that {0} is a beautiful city."],
             ["Where do I live?", "Which city do I live in?", "Where am I from?"],
             ["You live in {0}."], rng.choice(self.chat.CAP).split("|")[1]),
            ([f"I have a {pet} named {{0}}.", f"My {pet} is called {{0}}.", f"My {pet}'s name is {{0}}."],
             ["{0} is a lovely name!", f"{{0}} sounds like a nice {pet}."],
             [f"What is the name of my {pet}?", f"What is my {pet} called?", f"What is my {pet}'s name?"],
             [f"Your {pet} is called {{0}}."], pet_name),
            (["I like to eat {0}.", "My favorite food is {0}.", "I love {0}."],
             ["{0}! That sounds tasty.", "I have heard that {0} can be very tasty."],
             ["What is my favorite food?", "What do I like to eat?"],
             ["You like to eat {0}.", "Your favorite food is {0}."], rng.choice(foods)),
            (["I am {0} years old.", "I'm {0} years old."],
             ["Thank you for telling me. You are {0} years old.", "{0} is a good age!"],
             ["How old am I?", "What is my age?"], ["You are {0} years old."], rng.randint(5, 60)),
            ([f"My {kin}'s name is {{0}}.", f"My {kin} is called {{0}}."],
             ["{0} is a nice name!"],
             [f"What is the name of my {kin}?", f"What is my {kin}'s name?"], [f"Your {kin}'s name is {{0}}."], rng.choice(self.people)),
            (["I like {0}.", "My hobby is {0}.", "I love {0}."], ["{0} is fun!", "That is a nice hobby."],
             ["What is my hobby?", "What do I like to do?"], ["You like {0}."], hobby),
            (["I am a {0}.", "I work as a {0}."], ["That is a good job!", "That sounds interesting."],
             ["What is my job?", "What do I do?"], ["You are a {0}."], job),
        ]  # fmt: skip

    def facts_zh(self) -> list:
        rng = self.rng
        pet = rng.choice(["猫", "狗", "兔子", "鸟", "乌龟"])
        kin = rng.choice(["妈妈", "爸爸", "哥哥", "姐姐", "好朋友", "老师"])
        foods = [*self.chat.CATZ["水果"], "面条", "饺子", "米饭", "蛋糕", "面包"]
        cities = [line.split("|")[3] for line in self.chat.CAP] + self.chat.CATZ["城市"]
        hobby = rng.choice(["游泳", "跑步", "跳舞", "唱歌", "画画", "看书", "踢足球", "打篮球", "听音乐", "下棋"])
        job = rng.choice(["老师", "医生", "学生", "护士", "司机", "农民", "作家", "歌手", "程序员"])
        pet_name = rng.choice(["毛毛", "豆豆", "花花", "球球", "雪球", "点点", "乐乐", "可可"])
        return [
            (["我叫{0}。", "我的名字叫{0}。", "你好，我叫{0}。", "你好！我是{0}。", "我是{0}。"],
             ["你好，{0}！很高兴认识你。", "{0}，你好！"],
             ["我叫什么名字？", "你还记得我的名字吗？", "我是谁？", "我叫什么？"], ["你叫{0}。", "你的名字叫{0}。"], rng.choice(self.chat.ZNAME)),
            (["我喜欢{0}。", "我最喜欢的颜色是{0}。"], ["{0}真好看！", "{0}是很漂亮的颜色。"],
             ["我最喜欢什么颜色？", "我喜欢什么颜色？"], ["你喜欢{0}。"], rng.choice(self.chat.COLORS)[3]),
            (["我住在{0}。", "我家在{0}。"], ["{0}是个好地方！", "我听说{0}很不错。"],
             ["我住在哪里？", "我家在哪里？"], ["你住在{0}。"], rng.choice(cities)),
            ([f"我有一只{pet}，它叫{{0}}。", f"我的{pet}叫{{0}}。"], ["{0}真可爱！", "{0}，这个名字真好听！"],
             [f"我的{pet}叫什么名字？", f"我的{pet}叫什么？"], [f"你的{pet}叫{{0}}。"], pet_name),
            (["我喜欢吃{0}。", "我最爱吃{0}。"], ["{0}很好吃！", "听起来很好吃。"],
             ["我喜欢吃什么？", "我爱吃什么？"], ["你喜欢吃{0}。"], rng.choice(foods)),
            (["我今年{0}岁。", "我{0}岁了。"], ["好的，我记住了，你{0}岁。"],
             ["我今年多大？", "我几岁了？"], ["你今年{0}岁。", "你{0}岁。"], rng.randint(5, 60)),
            ([f"我的{kin}叫{{0}}。"], ["好的，我记住了。", "{0}，真好听的名字！"],
             [f"我的{kin}叫什么名字？", f"我的{kin}叫什么？"], [f"你的{kin}叫{{0}}。"], rng.choice(self.chat.ZNAME)),
            (["我喜欢{0}。", "我的爱好是{0}。"], ["{0}很有意思！", "真不错！"],
             ["我的爱好是什么？", "我喜欢做什么？"], ["你喜欢{0}。"], hobby),
            (["我是一名{0}。", "我的工作是{0}。"], ["真是一份好工作！", "听起来很有意思。"],
             ["我的工作是什么？", "我是做什么的？"], ["你是一名{0}。"], job),
        ]  # fmt: skip
