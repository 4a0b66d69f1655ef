"""Conversations for measuring drafts that come from text: edits of code, summaries with quotes, later turns of a
conversation, and JSON. What they have in common is that answers repeat part of what was said; how much, differs.

``CONVERSATIONS[kind]`` are lists of chat messages that end with the user's turn.
"""

from __future__ import annotations

Message = dict[str, str]

CODE = {
    "Rename the parameter `n` to `limit` everywhere, and return the whole file.": '''
def primes_below(n):
    """All primes below n, by the sieve of Eratosthenes."""
    if n <= 2:
        return []
    is_prime = [True] * n
    is_prime[0] = is_prime[1] = False
    for number in range(2, int(n ** 0.5) + 1):
        if is_prime[number]:
            for multiple in range(number * number, n, number):
                is_prime[multiple] = False
    return [number for number in range(n) if is_prime[number]]


def count_primes_below(n):
    """How many primes there are below n."""
    return len(primes_below(n))


def twin_primes_below(n):
    """Pairs of primes below n that differ by two."""
    primes = primes_below(n)
    return [(a, b) for a, b in zip(primes, primes[1:]) if b - a == 2]
''',
    "Add a method `clear` that empties the cache. Change nothing else and show the complete class.": '''
class LeastRecentlyUsedCache:
    def __init__(self, capacity):
        if capacity < 1:
            raise ValueError("capacity must be at least 1")
        self.capacity = capacity
        self.entries = {}

    def get(self, key, default=None):
        if key not in self.entries:
            return default
        value = self.entries.pop(key)
        self.entries[key] = value
        return value

    def put(self, key, value):
        if key in self.entries:
            self.entries.pop(key)
        elif len(self.entries) >= self.capacity:
            oldest = next(iter(self.entries))
            del self.entries[oldest]
        self.entries[key] = value

    def __len__(self):
        return len(self.entries)

    def __contains__(self, key):
        return key in self.entries
''',
    "Replace every use of `var` with `const` or `let`. Return the whole file without comments on your changes.": '''
var express = require("express");
var orders = require("./orders");
var app = express();

app.get("/orders", function (request, response) {
  var page = parseInt(request.query.page || "1", 10);
  var size = parseInt(request.query.size || "20", 10);
  var found = orders.list({ offset: (page - 1) * size, count: size });
  var total = 0;
  for (var i = 0; i < found.length; i++) {
    var order = found[i];
    total += order.price * order.quantity;
  }
  response.json({ page: page, size: size, total: total, orders: found });
});

app.get("/orders/:id", function (request, response) {
  var order = orders.find(request.params.id);
  if (!order) {
    response.status(404).json({ error: "no such order" });
    return;
  }
  response.json(order);
});

app.listen(8080);
''',
    "Add a column `updated_at timestamp not null` to each of the tables and print the full script.": '''
create table customers (
    id bigint primary key,
    name varchar(200) not null,
    email varchar(200) not null unique,
    created_at timestamp not null
);

create table products (
    id bigint primary key,
    title varchar(200) not null,
    price_cents integer not null check (price_cents >= 0),
    created_at timestamp not null
);

create table orders (
    id bigint primary key,
    customer_id bigint not null references customers (id),
    status varchar(20) not null default 'open',
    created_at timestamp not null
);

create table order_lines (
    order_id bigint not null references orders (id),
    product_id bigint not null references products (id),
    quantity integer not null check (quantity > 0),
    primary key (order_id, product_id)
);
''',
    "Handle a division by zero with an error, and show the file with that change.": '''
package calculator

import "fmt"

// Operation is one step of a calculation.
type Operation struct {
    Name  string
    Value float64
}

// Apply runs the operations one after another, beginning with start.
func Apply(start float64, operations []Operation) (float64, error) {
    result := start
    for index, operation := range operations {
        switch operation.Name {
        case "add":
            result += operation.Value
        case "subtract":
            result -= operation.Value
        case "multiply":
            result *= operation.Value
        case "divide":
            result /= operation.Value
        default:
            return 0, fmt.Errorf("operation %d has the unknown name %q", index, operation.Name)
        }
    }
    return result, nil
}
''',
    "Change the number of replicas to 5 and the image tag to 2.4.1. Output the manifest, nothing else.": '''
apiVersion: apps/v1
kind: Deployment
metadata:
  name: thumbnails
  labels:
    app: thumbnails
    team: media
spec:
  replicas: 2
  selector:
    matchLabels:
      app: thumbnails
  template:
    metadata:
      labels:
        app: thumbnails
        team: media
    spec:
      containers:
        - name: thumbnails
          image: registry.example.com/media/thumbnails:2.3.0
          ports:
            - containerPort: 8080
          resources:
            requests:
              cpu: 500m
              memory: 512Mi
            limits:
              cpu: "1"
              memory: 1Gi
          readinessProbe:
            httpGet:
              path: /ready
              port: 8080
''',
    "Add type hints to all functions and give back the complete module.": '''
import csv
from pathlib import Path


def read_rows(path):
    """The rows of a file as dictionaries."""
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


def total_by(rows, key, amount):
    """The sum of one column for each value of another."""
    totals = {}
    for row in rows:
        totals[row[key]] = totals.get(row[key], 0.0) + float(row[amount])
    return totals


def write_totals(path, totals):
    """Write totals, the largest first."""
    with Path(path).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "total"])
        for name, total in sorted(totals.items(), key=lambda item: -item[1]):
            writer.writerow([name, f"{total:.2f}"])
''',
    "The loop reads one element too many. Fix it and repeat the program.": '''
#include <stdio.h>
#include <stdlib.h>

struct reading {
    int station;
    double celsius;
};

static double mean(const struct reading *readings, int count) {
    double sum = 0.0;
    for (int i = 0; i <= count; i++) {
        sum += readings[i].celsius;
    }
    return count ? sum / count : 0.0;
}

int main(void) {
    struct reading readings[] = {
        {1, 17.5}, {1, 18.25}, {2, 15.0}, {2, 14.75}, {3, 21.0},
    };
    int count = sizeof(readings) / sizeof(readings[0]);
    printf("mean of %d readings: %.2f\\n", count, mean(readings, count));
    return EXIT_SUCCESS;
}
''',
}

REPORTS = {
    "Summarise the minutes in five sentences. Quote the decisions word for word.": """
Minutes of the allotment association, 14 March. Present were eleven of nineteen members; Mrs Okafor took the chair.
The treasurer reported that the account holds 2,310 euros and that all rents but two have been paid. Mr Lindgren asked
why the water bill had doubled. The treasurer answered that the pipe near plot 7 had leaked for most of the summer. It
was decided: the pipe near plot 7 shall be replaced before the first of May, at a cost of no more than 900 euros. Ms
Adeyemi offered to compare prices. The second item was the hedge along the railway. The railway company has written
that branches over the track must be cut back by two metres. It was decided: every member with a plot along the
railway shall cut the hedge by two metres before the end of April, and the association lends the tools. The third item
was bees. Three members wish to keep hives, one member is allergic. It was decided: hives may stand on plots 15 to 19
only, and a sign shall warn visitors. The next meeting is on 13 June.
""",
    "What went wrong, and why? Answer briefly and quote the two most important sentences of the report.": """
Incident report, payment service. On Tuesday at 09:42 the rate of failed payments rose from 0.2 to 31 percent. The on-
call engineer was paged at 09:47 and saw that all failures came from cards of one bank. At first the bank was thought
to be at fault. At 10:05 a colleague noticed that the certificate which we use to talk to that bank had expired at
09:40. The reminder to renew it had been sent to the mailbox of an employee who left in November. A new certificate
was requested at 10:11 and installed at 10:38, after which failures fell to the usual level. Altogether 4,180 payments
failed, of which customers repeated 3,502 successfully on the same day. No payment was charged twice. We will send
reminders to the team's mailbox, watch the expiry of all certificates with the monitoring system, and practise the
renewal once every quarter.
""",
    "Explain to a visitor what she can see there, quoting the guide where it describes the colours.": """
The town museum is in the old customs house. The ground floor shows the harbour as it was around 1900: ropes, sails, a
diving suit, and a model of the crane that stood at the east quay until the flood. On the first floor are paintings of
the colony of artists who spent their summers here. Look for the three views of the bay by Anna Vestergaard: in the
first the water is a flat pale green under a white sky, in the second it is the deep blue of slate after rain, and in
the third, painted in the year of her death, sea and sky are one warm grey with a thin line of orange between them.
The second floor is for children, who may knot nets, ring a ship's bell, and send messages in Morse code from one end
of the attic to the other. The café in the yard is open from April to October. The museum is closed on Mondays.
""",
    "List the tenant's duties. Use the wording of the agreement.": """
Agreement on the use of the workshop. The tenant may use the workshop on weekdays from 7 to 21 hours and on Saturdays
from 9 to 18 hours. The tenant shall keep the floor around the machines free of shavings and shall empty the dust bags
at the end of each day. The tenant shall wear glasses and ear protection at the saw and the planer. The landlord
services the machines twice a year and replaces worn blades within a week of being told. The tenant shall report any
damage at once and shall not use a damaged machine. The tenant shall not let others use the workshop without the
landlord's written consent. The rent is 180 euros a month, due on the third working day. Electricity is included up to
200 kilowatt hours a month; the tenant shall pay what goes beyond that at 32 cents per kilowatt hour. Either side may
end the agreement with six weeks' notice to the end of a month.
""",
    "Give the gist in three bullet points, each with a short quotation.": """
For eleven years Marit Solberg has counted birds on the same two kilometres of coast, every Sunday at sunrise. "People
think that it is about the birds," she says, "but after a while it is about the Sundays." Her notebooks show that
oystercatchers arrive nine days earlier than when she began, and that the number of curlews has fallen by half. The
university in the city asked for a copy of her figures last year, since nobody else has measured that stretch of shore
without a gap. She sent them the notebooks themselves. "A copy would have left out the weather in the margins," she
explains, "and half of what I know is in the margins." This spring two students walk with her. They use a telescope
and an app. She uses a pencil, and so far, she says, they have not found a bird that the pencil missed.
""",
    "Which symptoms and measures does the leaflet name? Repeat its sentences where possible.": """
Heat in the workplace. Work in great heat puts a strain on heart and circulation. First signs of heat exhaustion are
headache, dizziness and nausea. Bring the person into the shade, raise the legs and offer water in small sips. If the
skin is hot and dry and the person seems confused, it may be a heat stroke: call an ambulance at once and cool the
body with wet cloths. To prevent this, begin work early, take a break of ten minutes in each hour above 30 degrees,
and drink a glass of water every twenty minutes. Wear light clothes with long sleeves and a hat that covers the neck.
New workers need about a week to get used to heat and should do half of the usual work in their first days.
""",
    "Compare the two offers and quote the conditions that matter.": """
Offer A: The bicycle courier company Swift delivers parcels up to 15 kilograms within the city on the same day if they
are handed over before 14 hours. A delivery costs 6.90 euros; from 50 deliveries a month on it costs 5.40 euros. Lost
parcels are replaced up to a value of 250 euros. The contract runs for three months and is renewed unless it is ended
two weeks before.
Offer B: The haulage company Berger delivers parcels up to 30 kilograms within the city on the next working day if
they are handed over before 17 hours. A delivery costs 4.20 euros whatever their number. Lost parcels are replaced up
to a value of 500 euros if the sender can show an invoice. The contract runs for twelve months and ends by itself.
""",
    "Write down the recipe as numbered steps, keeping the author's words.": """
My grandmother's plum cake needs no scales. She took a cup of soft butter and a cup of sugar and beat them until her
arm hurt. Then she stirred in four eggs, one after the other, and waited each time until the dough was smooth again.
Two cups of flour and a spoon of baking powder were sifted over it and folded in with a wooden spoon, never with the
mixer. She spread the dough in a square tin, put the halved plums on it in rows with the cut side up, and pressed each
one down a little with her thumb. Over everything went a handful of sugar mixed with cinnamon. The cake was baked for
three quarters of an hour at a medium heat, until the edges were brown and the plums had begun to weep. It was best on
the second day.
""",
}

TURNS = [
    ("Write a packing list for a weekend of hiking with a tent in autumn.",
     "Tent with pegs and lines\nSleeping bag for 0 degrees\nSleeping mat\nHead torch with spare batteries\nRain "
     "jacket and "
     "trousers\nWarm hat and gloves\nTwo pairs of wool socks\nStove, gas and lighter\nPot, cup and spoon\nWater "
     "filter\n"
     "Map and compass\nFirst aid kit\nPhone and power bank",
     "Two more people come along. Adapt the list, keeping the lines that stay the same."),
    ("Draft a short message to my neighbours about the building work in our kitchen next week.",
     "Dear neighbours, next week our kitchen is being rebuilt. From Monday to Thursday there will be noise between 8 "
     "and 17 "
     "hours, most of it on Monday, when the old tiles are removed. The lift may be in use for a few minutes at a "
     "time. If you "
     "need quiet at a particular hour, please tell us and we will ask the workers to plan around it. Thank you for "
     "your "
     "patience. The family on the third floor",
     "The work was moved to Wednesday to Saturday, and tiles are removed on Wednesday. Please write it again."),
    ("What are the planets, in order, with one fact each?",
     "1. Mercury: it has almost no atmosphere.\n2. Venus: it is the hottest planet.\n3. Earth: the only one known to "
     "have life.\n"
     "4. Mars: it has the tallest volcano.\n5. Jupiter: it is the largest.\n6. Saturn: its rings are mostly ice.\n7. "
     "Uranus: it "
     "rotates on its side.\n8. Neptune: its winds are the fastest.",
     "Now the same list, from the outermost to the innermost."),
    ("Suggest a timetable for learning the guitar, half an hour a day.",
     "Minutes 0 to 5: tune the guitar and warm up the fingers.\nMinutes 5 to 12: practise changing between two "
     "chords.\nMinutes 12 "
     "to 20: play a song slowly with a metronome.\nMinutes 20 to 26: learn one new thing, a chord or a strumming "
     "pattern.\nMinutes "
     "26 to 30: play whatever you like.",
     "I have forty-five minutes on Sundays. Make a version for that day."),
    ("Translate into simple English: The aforementioned premises shall be vacated forthwith upon cessation of the "
     "tenancy.",
     "You must leave the building as soon as your rental contract ends.",
     "Good. Do the same for: The lessee shall indemnify the lessor against all claims arising from the use of the "
     "aforementioned "
     "premises, and explain every hard word of both sentences."),
    ("Write a function in Python that tells whether a text is a palindrome.",
     "```python\ndef is_palindrome(text):\n    letters = [letter.lower() for letter in text if letter.isalnum()]\n   "
     " return letters "
     "== letters[::-1]\n```\nIt ignores case and everything that is neither a letter nor a digit.",
     "Add a parameter that keeps the case, a docstring, and three asserts as a test."),
    ("Give me a weekly menu, dinners only, vegetarian.",
     "Monday: lentil soup with bread\nTuesday: spinach and feta pie\nWednesday: vegetable curry with rice\nThursday: "
     "pasta with "
     "tomatoes and basil\nFriday: mushroom risotto\nSaturday: bean chilli with corn bread\nSunday: roasted pumpkin "
     "with couscous",
     "No mushrooms please, and something with potatoes on Saturday. Show the whole week again."),
    ("How do I reset the coffee machine in our office?",
     "1. Switch the machine off at the back.\n2. Hold the button with the cup for five seconds.\n3. While you hold "
     "it, switch the "
     "machine on again.\n4. Wait until both lamps blink.\n5. Empty the tray and fill the water tank.\n6. Press the "
     "button with the "
     "cup once; the machine rinses itself.",
     "At step 4 only one lamp blinks. Repeat the steps with what I should do then."),
]

RECORDS = {
    "Convert these lines into a JSON array of objects with the keys name, role, city and email.": """
Amina Diallo, accountant, Dakar, amina.diallo@example.com
Jonas Weber, electrician, Leipzig, jonas.weber@example.com
Mei Tanaka, translator, Osaka, mei.tanaka@example.com
Carlos Ferreira, nurse, Porto, carlos.ferreira@example.com
Elif Yilmaz, architect, Izmir, elif.yilmaz@example.com
Liam O'Hara, teacher, Galway, liam.ohara@example.com
""",
    "Return this document with all prices raised by ten percent, as JSON and nothing else.": """
{"menu": [{"dish": "tomato soup", "price": 5.0, "vegan": true}, {"dish": "goat cheese salad", "price": 8.0, "vegan":
false}, {"dish": "mushroom risotto", "price": 12.0, "vegan": false}, {"dish": "grilled trout", "price": 18.0, "vegan":
false}, {"dish": "lentil stew", "price": 10.0, "vegan": true}, {"dish": "apple cake", "price": 4.0, "vegan": false}]}
""",
    "Extract every appointment as a JSON object with date, time, place and topic.": """
Hello everyone, three dates for the coming weeks. We meet the architect on 3 May at 10:00 in the town hall to talk
about the roof. The fire brigade inspects the building on 7 May at 8:30, please meet at the back entrance. The
parents' evening about the school trip is on 21 May at 19:00 in the gymnasium. If it rains, the summer party planning
on 24 May at 17:30 takes place in the library.
""",
    "Write a JSON schema for objects such as this one. All fields are required.": """
{"id": "order-2041", "customer": {"name": "Elena Novak", "email": "elena@example.com", "newsletter": false}, "lines":
[{"sku": "KB-17", "quantity": 2, "unit_price": 49.9}, {"sku": "MS-03", "quantity": 1, "unit_price": 19.5}],
"shipping": {"method": "courier", "address": {"street": "Quay 4", "city": "Gdansk", "postcode": "80-001"}}, "paid":
true}
""",
    "Here is a configuration. Add a second server called backup with the same settings, and return all of it as "
    "JSON.": """
{"servers": [{"name": "main", "host": "10.0.0.4", "port": 8443, "tls": true, "timeouts": {"connect_ms": 500,
"read_ms": 5000, "idle_ms": 60000}, "limits": {"max_connections": 2000, "max_body_bytes": 1048576}, "log": {"level":
"info", "format": "json"}}]}
""",
    "Turn the table into JSON: a list of objects, one per row, with the column names as keys.": """
| station | line | opened | steps | lift |
|---|---|---|---|---|
| Harbour | U1 | 1912 | 64 | no |
| Market | U1 | 1912 | 58 | yes |
| Central | U1 | 1926 | 102 | yes |
| University | U2 | 1961 | 71 | yes |
| Zoo | U2 | 1973 | 66 | no |
| Airport | U3 | 1998 | 120 | yes |
""",
    "Label each review as positive, neutral or negative. Answer with a JSON list of objects with the keys review and "
    "label.": """
1. The shoes are light and dry quickly, I wear them every day.
2. Delivery took three weeks and nobody answered my messages.
3. The lamp is as described.
4. The second pair is as good as the first, thank you!
5. The zip broke on the second day, and the colour is not the one in the picture.
6. Works. Not more and not less than I expected for the price.
""",
    "Make a tool call for each request, as JSON objects with the keys name and arguments.": """
Tools: get_weather(city, day), book_table(restaurant, day, time, persons), send_message(to, text).
Requests: What will the weather be like in Bergen on Friday? Book a table for four at Casa Lucia on Friday at 20:00.
Write to Nadia that we meet at Casa Lucia on Friday at 20:00. What will the weather be like in Bergen on Saturday?
Write to Oscar that the hike on Saturday takes place unless it rains.
""",
}


def _ask(texts: dict[str, str], fence: str = "") -> list[list[Message]]:
    return [
        [{"role": "user", "content": f"{task}\n\n{fence}{text if fence else text.strip()}{fence}"}]
        for task, text in texts.items()
    ]


CONVERSATIONS: dict[str, list[list[Message]]] = {
    "code editing": _ask(CODE, "```"),
    "summary with quotes": _ask(REPORTS),
    "multi-turn": [
        [
            {"role": "user", "content": first}, {"role": "assistant", "content": answer},
            {"role": "user", "content": second}
        ]
        for first, answer, second in TURNS
    ],
    "JSON": _ask(RECORDS),
}
