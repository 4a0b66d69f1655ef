"""Prompts for `benchmarks.train_eagle3`, made from lists of subjects and tasks: no data set is needed."""

from __future__ import annotations

import random

SUBJECTS = """black holes|photosynthesis|the French Revolution|sourdough bread|binary search|glaciers|jazz|vaccines
volcanoes|the stock market|chess openings|solar panels|honey bees|the Roman Empire|climate change|electric cars
plate tectonics|machine learning|the human heart|coral reefs|the Silk Road|coffee|public libraries|marathons
quantum computers|the water cycle|origami|desert animals|the printing press|home gardening|recycling|dinosaurs
the moon landing|sleep|budgeting|bicycles|bridges|the Great Wall|rainforests|batteries|poetry|photography|databases
hash tables|neural networks|recursion|unit tests|HTTP requests|sorting algorithms|prime numbers|fractions|gravity
the immune system|tea ceremonies|lighthouses|whales|snow|deserts|time zones|calendars|maps|compasses|telescopes
microscopes|antibiotics|protein|exercise|meditation|job interviews|remote work|city planning|trains|airplanes|ships
robots|3D printing|encryption|passwords|open source software|operating systems|spreadsheets|weather forecasts
earthquakes|hurricanes|rivers|oceans|forests|mushrooms|bread|cheese|soup|pasta|rice|chocolate|spices|wine|football
tennis|swimming|mountain climbing|camping|astronomy|philosophy|democracy|taxes|inflation|trade|museums|theatre
painting|sculpture|architecture|languages|grammar|dictionaries|translation|history|archaeology|Egypt|Japan|Brazil
Kenya|Norway|Canada|India|dogs|cats|horses|birds|insects|fish|penguins|elephants|dolphins|trees|flowers|roses"""

TASKS = """What is {a}?|Explain {a} to a ten year old.|Explain {a} in simple terms.|Write a short story about {a}.
List five facts about {a}.|What are the advantages and disadvantages of {a}?|How do {a} and {b} differ?
Write a poem about {a}.|Give me three tips about {a}.|Why is {a} important?|Describe the history of {a}.
Write an email to a colleague about {a}.|Make a plan to learn about {a} in a week.|Write a quiz on {a}.
Summarise what is known about {a} in three sentences.|Write a dialogue between two friends about {a} and {b}.
What do beginners get wrong about {a}?|Write a product description that mentions {a}.|Tell me a joke about {a}.
Compare {a} and {b} in a table.|Write a blog post introduction on {a}.|What would happen without {a}?
Write a Python function that prints a line about {a}.|Write a Python class for {a} with two methods.
Write a JSON object that describes {a}, with the keys name, category, description and tags.
Write an HTML page with a heading and a list about {a}.|Write a SQL table for {a} and insert three rows.
Rewrite this sentence more formally: {a} is really cool and everybody should know about it.
Correct the grammar: {a} are be very good for peoples who likes {b}.
Translate to French: I would like to know more about {a}.|Turn this into a list: {a}, {b}, {c}.
Answer with yes or no and a reason: is {a} older than {b}?|Write a press release about {a}.|Define {a}.
Write step by step instructions that have to do with {a}.|How is {a} related to {b} and {c}?
Write a haiku about {a}.|Give an example of {a} in daily life.|What questions should I ask an expert on {a}?"""

CODE = """Write a Python function that {do}.|Write a JavaScript function that {do}.|Show and explain code that {do}.
Fix this function so that it {do}: def f(x): return x"""

DOES = """reverses a string|sums a list of numbers|counts words in a text|finds the largest number in a list
checks whether a number is prime|reads a CSV file|sorts a list of names|removes duplicates from a list
computes the Fibonacci sequence|merges two dictionaries|converts Celsius to Fahrenheit|validates an email address
computes the average of a list|finds the longest word|parses a date|downloads a web page|writes lines to a file
generates random passwords|counts vowels|flattens a nested list|checks for palindromes|computes a factorial"""

FOLLOW_UPS = """Can you make that shorter?|Give me another example.|Why?|Say it in other words.|What else should I know?
Write it as a list.|Thanks! Now tell me about {b}."""

SYSTEMS = ("You are a helpful assistant.", "You answer briefly.", "You are a patient teacher.", "You are a programmer.")


def _split(text: str) -> list[str]:
    return text.replace("\n", "|").split("|")


def write_prompts(count: int, seed: int) -> list[list[dict[str, str]]]:
    """Conversations whose last message is the user's; some with a system message, some with an earlier turn."""
    draw = random.Random(seed)
    subjects, tasks, code, does, follow_ups = map(_split, (SUBJECTS, TASKS, CODE, DOES, FOLLOW_UPS))
    return [_write_one(draw, subjects, tasks, code, does, follow_ups) for _ in range(count)]


def _write_one(draw: random.Random, subjects: list[str], tasks: list[str], code: list[str], does: list[str],
               follow_ups: list[str]) -> list[dict[str, str]]:
    a, b, c = draw.sample(subjects, 3)
    if draw.random() < 0.2:
        text = draw.choice(code).format(do=draw.choice(does))
    else:
        text = draw.choice(tasks).format(a=a, b=b, c=c)
    messages = [{"role": "user", "content": text}]
    if draw.random() < 0.15:
        reply = f"{a[0].upper()}{a[1:]} has many sides, and {b} is one of them."
        messages += [{"role": "assistant", "content": reply},
                     {"role": "user", "content": draw.choice(follow_ups).format(b=b)}]
    if draw.random() < 0.3:
        messages.insert(0, {"role": "system", "content": draw.choice(SYSTEMS)})
    return messages
