"""The tables of the grammar behind `Stories`: who, what, where, the plots, and the ways to tell each of their beats.

How to read them: `{hero}`, `{he}`, `{him}`, `{his}` are the hero and the hero's pronouns; `{friend}`, `{he2}` ... the
friend's; `{elder}`, `{he3}` ... the elder's. Names from `TRAITS` keep their value through a story, names from `MOTIVES`
through a plot, names from `WORDS` are drawn anew at every use. A capital first letter (`{He}`, `{Day}`) begins a
sentence.
"""

PRONOUNS = {"girl": ("she", "her", "her"), "boy": ("he", "him", "his")}

CHILDREN = (
    *((name, "girl") for name in "Lily Mia Anna Zoe Ruby Nora Ella Maya Lucy Rosa Ivy Clara Hana Nina Tess".split()),
    *((name, "girl") for name in "Amira Emma Freya Greta June Kira Leila Olive Priya Sofia".split()),
    *((name, "boy") for name in "Tom Ben Max Leo Sam Finn Jack Omar Theo Hugo Noah Luca Raj Eli Otto".split()),
    *((name, "boy") for name in "Adam Carlos David Felix Henry Ivan Kenji Mateo Oscar Peter".split()),
)
ELDERS = (
    *((name, "girl") for name in "Grandma Rose/Mrs. Fern/Aunt May/Mrs. Plum/Miss Dove/old Mary".split("/")),
    *((name, "boy") for name in "Grandpa Joe/Mr. Hill/Uncle Bo/Mr. Reed/Mr. Stone/old Walter".split("/")),
)

_TRAITS = {
    "bond": "friend/best friend/cousin/neighbor/good friend",
    "trait": "brave/curious/kind/shy/cheerful/careful/patient/clever/quiet/gentle/friendly/helpful",
    "home": "in a small house by the river/in a white house on the hill/in a village near the sea/"
    "on a farm by the woods/in a tall house in the city/on a quiet street with old trees/in a cabin near the mountains",
    "giver": "grandmother/father/mother/grandfather/aunt/big sister/uncle",
}
_MOTIVES = {
    "place": "the park/the forest/the beach/the meadow/the market/the lake/the playground/the old mill/the river/"
    "the orchard/the harbor/the castle/the library garden/the waterfall/the railway station",
    "color": "red/blue/green/yellow/purple/orange/silver/golden/shiny/little/old/white/striped/colorful",
    "thing": "kite/drum/scarf/lantern/whistle/compass/hat/toy boat/teddy bear/ball/bell/umbrella/storybook/feather/"
    "coin/key/doll/basket/toy train/music box/telescope/bracelet/notebook/balloon/magnet/paintbrush/flute",
    "fragile": "blue vase/clay bird/glass horse/model ship/tea cup/painted plate/wooden clock/garden lamp/"
    "crystal bowl/picture frame/snow globe/porcelain teapot",
    "animal": "puppy/kitten/rabbit/duckling/goat/parrot/pony/turtle/lamb/hedgehog/squirrel/piglet/donkey/chicken",
    "pet": "Biscuit/Pip/Shadow/Button/Clover/Pepper/Bubbles/Mango/Snowy/Pickle/Cookie/Dusty/Ginger/Marble",
    "food": "apple pie/honey cake/tomato soup/warm bread/cherry jam/corn pudding/carrot cake/berry muffins/pancakes/"
    "cheese sandwiches/lemon cookies/roasted nuts/fresh strawberries/vanilla pudding/mushroom stew/banana bread",
    "spot": "under a bench/behind a big rock/in the tall grass/inside a hollow tree/under a pile of leaves/"
    "at the bottom of a basket/between two bushes/beside the gate/on a low branch/next to the bridge/"
    "among the flowers/near the fountain",
    "shelter": "a cave/a barn/a wooden shed/an empty boat house/a hut made of stones/a shepherd's cottage/a tunnel/"
    "an abandoned tower",
    "project": "tree house/raft/bird house/puppet theater/wooden bridge/go-cart/snow fort/windmill/swing/wagon/"
    "lighthouse/sled/scarecrow",
    "part": "rope/nails/boards/paint/long sticks/buckets/wheels/glue/blankets/branches/canvas/hammers/ribbons",
    "plant": "sunflower/pumpkin/melon/bean plant/rose bush/strawberry plant/tulip/tomato plant/daisy/lavender bush/"
    "grape vine/cabbage",
    "race": "the running race/the boat race/the sack race/the bicycle race/the swimming race/the ski race/"
    "the skating race/the canoe race/the mountain race",
    "fear": "the dark/deep water/high places/loud thunder/big dogs/the stage/the old bridge/being alone/spiders/"
    "strangers/deep snow/the cellar",
    "prize": "gold coins/old letters/colored stones/a tiny crown/painted marbles/a bag of seeds/a silver cup/"
    "ancient maps/a pearl necklace/a photograph/seven candles",
    "sky": "sunny/windy/cloudy/rainy/cold/foggy/warm/snowy",
}
_WORDS = {
    "day": "one morning/one day/one afternoon/one {sky} day/on a {sky} morning/last spring/early one day/on Sunday/"
    "after lunch/the next day, after school/on the first day of summer",
    "later": "later/soon/after a while/a little later/before long/after some time/an hour later",
    "sudden": "suddenly/all at once/just then/at that moment/out of nowhere",
    "night": "that night/that evening/at bedtime/when the stars came out/after dinner",
    "happy": "happy/glad/proud/excited/pleased/cheerful",
    "sad": "sad/upset/worried/unhappy/gloomy/troubled",
    "said": "said/said/whispered/called",
    "said2": "said/said/answered/replied",
    "yes": "Yes/Of course/Good idea/All right/Sure/That sounds fun",
    "very": "very/so/really",
    "looked": "looked/searched/hunted/peeked/checked",
    "near": "behind the wall/under the leaves/by the path/near the pond/along the fence/around the corner/"
    "between the stones/under the stairs/behind the trees",
    "went": "went/walked/ran/hurried/skipped",
    "smiled": "smiled/laughed/clapped/grinned/danced around/jumped up and down",
    "slow": "slowly/carefully/step by step/very quietly/bit by bit",
    "big": "big/huge/great/mighty",
    "nice": "lovely/wonderful/beautiful/great/perfect",
    "game": "hide and seek/tag/catch/chess/cards/pirates/soccer",
    "number": "ten/twelve/twenty/thirty/fifty",
}
BEATS = {
    "open": (
        "Once upon a time, there was a {trait} {kind} named {hero}. {He} lived {home}.",
        "{hero} was a {trait} {kind} who lived {home}.",
        "{Home} lived a {kind} called {hero}. Everyone said that {he} was {very} {trait}.",
        "There once was a {kind} named {hero}. {He} was {trait}, and {he} liked to play {game}.",
        "This is the story of {hero}, a {trait} {kind} who lived {home}.",
        "Early one morning, a {trait} {kind} named {hero} woke up. It was a {sky} day.",
    ),
    "bond": (
        "{His} {bond} was a {kind2} named {friend}.",
        "{hero} had a {bond} named {friend}, and they liked to play {game}.",
        "{friend} was {his} {bond}. They did almost everything together.",
        "Every day {he} met {his} {bond} {friend} at {place}.",
        "{He} often played {game} with {friend}, {his} {bond}.",
    ),
    "own": (
        "{hero} had {a_thing}. {His} {giver} had given it to {him}.",
        "More than anything, {hero} loved {his} {color} {thing}, a gift from {his} {giver}.",
        "{His} {giver} had found {a_thing} for {him}, and {he} took it everywhere.",
        "On {his} birthday, {hero} got {a_thing} from {his} {giver}. {He} was {very} {happy}.",
    ),
    "go": (
        "{Day}, {hero} and {friend} {went} to {place}.",
        '{Day}, {friend} came to the door. "Do you want to go to {place}?" {he2} asked. "{yes}!" said {hero}.',
        "{Day}, the two children {went} to {place}. The weather was {sky}.",
        '"Let us go to {place}," {said} {hero}. {friend} took {his2} coat, and they {went} there together.',
        "It was {sky} outside, so {hero} asked {friend} to come to {place}.",
    ),
    "lose": (
        "When it was time to go home, the {thing} was gone. {hero} felt {sad}.",
        '{Sudden}, {hero} stopped. "Where is my {thing}?" {he} cried. "I had it a moment ago!"',
        "They played {game} for so long that {hero} forgot the {thing}. {Later}, {he} could not find it.",
        "It began to rain, and they ran to a tree. There {hero} saw that {his} {color} {thing} was missing.",
    ),
    "search": (
        "They {looked} {near} and {near}, but the {thing} was not there.",
        "{hero} {looked} {near}. {friend} {looked} {near}. They found only an old shoe.",
        '{friend} {looked} {near}. "It is not here," {he2} {said2}.',
        "First they {looked} {near}. Then they asked {elder}, but {he3} had not seen it.",
    ),
    "comfort": (
        '"Do not be sad," {said2} {friend}. "I will help you."',
        '{friend} saw that {hero} was {sad}. {He2} took {his} hand. "We will do it together," {he2} {said2}.',
        '"I am sad," said {hero}. "I know," {said2} {friend}, "but we must not give up."',
        "{friend} gave {him} a hug, and {hero} felt a little better.",
    ),
    "find": (
        '{Sudden}, {friend} saw something {color} {spot}. "Is that your {thing}?" {he2} asked. It was!',
        "{Later}, {hero} {looked} {spot}, and there was the {thing}! {He} {smiled}.",
        "{pet} the {animal} stopped {spot} and did not want to move. Of course! There was the {color} {thing}.",
        "At last they found it {spot}. The {thing} was a bit dirty, but {hero} did not mind.",
    ),
    "break": (
        "{hero} ran through the room and bumped into the table. Crash! {Elder}'s {fragile} fell and broke.",
        "{hero} wanted to hold the {fragile} that belonged to {elder}. It slipped out of {his} hands and broke.",
        "They played {game} in the house, and {hero} hit the shelf. The {fragile} fell down. {Elder} loved it.",
        '"Do not touch the {fragile}," {elder} had said. But {hero} touched it, and a piece came off.',
    ),
    "hide": (
        "{hero} was afraid, so {he} hid the pieces {spot}. {He} did not say a word, but {he} felt {sad}.",
        '"{Elder} will be angry," {said} {hero}. {He} put the {fragile} {spot} and went away.',
        '"Nobody saw me," {he} thought. But {friend} had seen it all.',
    ),
    "advise": (
        '"You must tell {elder} the truth," {said2} {friend}. "I will come with you."',
        '"It was an accident," {said2} {friend}. "{Elder} will understand, if you are honest."',
        '{Night}, {hero} could not sleep because of the {fragile}. "I have to tell it," {he} thought.',
    ),
    "confess": (
        '{hero} went to {elder}. "I broke the {fragile}," {he} said. "I am sorry."',
        'With a red face, {hero} told {elder} about the {fragile}. "Please forgive me," {he} {said}.',
        '{Slow}, {hero} brought back the pieces to {elder}. "It was me," {he} {said}.',
    ),
    "forgive": (
        '"Thank you for telling me," said {elder}. Together they fixed the {fragile} with glue.',
        "{Elder} was not angry at all. {He3} repaired the {fragile}, and then they all ate {food}.",
        '{Elder} smiled. "I can mend a {fragile}," {he3} said, "and I like an honest {kind}."',
    ),
    "stray": (
        "{Sudden}, they heard a small sound. {Spot} sat a lost {animal}! It looked {very} hungry.",
        "There {hero} found a {animal} {spot}. It was alone, and it was shaking.",
        'A {animal} sat {spot}. "Oh, look!" said {friend}. "It has lost its way."',
        "{Spot}, a little {animal} was hiding. {hero} came closer {slow}, so that it would not run away.",
    ),
    "feed": (
        "{hero} gave the {animal} some {food}, and it ate everything.",
        "The {animal} was cold, so {friend} wrapped it in {his2} coat.",
        '"You are safe with us," {said} {hero}, and the {animal} licked {his} hand.',
        "They brought it water, and {later} it began to play.",
    ),
    "owner": (
        '{Later}, they met {elder}. "That is my {animal}! Its name is {pet}," {he3} cried.',
        'They asked at every door. At the last one, {elder} opened and smiled. "{pet}, you are back!" {he3} said.',
        'They put up a sign at {place}. The next day {elder} came. "You found {pet}, my {animal}," {he3} said.',
    ),
    "reward": (
        "{Elder} thanked them and gave them {food}. They could visit {pet} every day.",
        '"Come and play with {pet} when you like," said {elder}. {hero} was {very} {happy}.',
        "As a thank you, {elder} gave {a_thing} to {hero} and {food} to {friend}.",
    ),
    "afraid": (
        "{hero} was afraid of {fear}. When others laughed about it, {he} felt {sad}.",
        "There was one thing that {hero} did not like: {fear}. It made {his} knees shake.",
        'At {place}, {hero} stopped. "I cannot do it," {he} {said}. "I am afraid of {fear}."',
        "The other children had fun, but {hero} only watched, because {he} was afraid of {fear}.",
    ),
    "encourage": (
        '"I was afraid of {fear} too," {said2} {friend}. "Hold my hand and breathe slowly."',
        '{friend} had an idea. {He2} gave {hero} {his2} {color} {thing}. "It will make you brave," {he2} {said2}.',
        '{Elder} heard about it. "Being brave means that you are afraid and still try," {he3} said.',
    ),
    "try": (
        "So {hero} closed {his} eyes and counted to {number}. {friend} stayed next to {him}.",
        "The first time, {hero} ran away. The second time, {he} stayed for a minute. The third time, {he} did it!",
        "{Slow}, {hero} tried. {His} heart beat fast, but {he} did not stop.",
    ),
    "brave": (
        '"I did it!" shouted {hero}. {He} was not afraid of {fear} any more.',
        "From that day on, {hero} was not so afraid of {fear}, and {he} was {very} {happy}.",
        '"You see?" {said2} {friend}. "It is not so bad." {hero} {smiled}.',
    ),
    "storm": (
        "{Sudden}, the sky turned black. {Big} drops began to fall, and the wind shook the trees.",
        "{Later}, dark clouds came over {place}. There was a flash, and then a {big} boom.",
        '"Look at the sky!" cried {friend}. A {big} storm was coming, and home was far away.',
    ),
    "shelter": (
        "They ran until they found {shelter}. Inside it was dry, but {very} dark.",
        '"Over there!" called {hero}. They hid in {shelter} and waited.',
        "{friend} knew {shelter} not far away. They got there just in time.",
    ),
    "wait": (
        "To pass the time, they told each other stories and ate {food}.",
        "{friend} was {sad}, so {hero} sang a song for {him2}.",
        "{hero} had {a_thing} with {him}, and they played with it until the rain stopped.",
        "A {animal} had hidden there too. They kept each other warm.",
    ),
    "calm": (
        "{Later}, the sun came back, and there was a {nice} rainbow over {place}.",
        "At last the storm was over. {Elder} was already looking for them, and {he3} brought dry clothes.",
        "When the thunder stopped, they {went} home. {Elder} had made {food} for them.",
    ),
    "plan": (
        '"Let us build a {project}," {said} {hero}. "{yes}," {said2} {friend}.',
        "{hero} and {friend} wanted to build a {project} near {place}. They drew a plan first.",
        '{friend} had seen a {project} in a book. "We can make one too," {he2} {said2}.',
    ),
    "need": (
        "But they had no {part}. They asked {elder}, and {he3} gave them some.",
        'To build it, they needed {part}. "You can have mine," said {elder}.',
        "{hero} brought wood and {friend} brought {part}. They worked all morning.",
    ),
    "fail": (
        "When it was almost done, the {project} fell down with a {big} noise. {hero} was {sad}.",
        'The first {project} was crooked and broke. "We went too fast," {said2} {friend}.',
        "Then the wind came and broke the {project}. They had to begin again.",
    ),
    "rebuild": (
        "This time they worked {slow}. {hero} held the wood, and {friend} used the {part}.",
        "They tried again and again. {Elder} showed them how to do it, and {later} the {project} was done.",
        "{friend} measured, {hero} cut, and at sunset the {project} was ready.",
    ),
    "enjoy": (
        "It was the best {project} in the world. They sat there and ate {food}.",
        "They wrote their names on it in {color} letters: {hero} and {friend}.",
        "Soon all the children came to see the {project}, and {hero} was {very} {happy}.",
    ),
    "seed": (
        '{Day}, {elder} gave {hero} a small seed. "It will be a {plant}," {he3} said. "Take good care of it."',
        "{hero} found a seed {spot}. {friend} thought that it could be a {plant}. They planted it behind the house.",
        "{hero} and {friend} wanted to grow a {plant}. They made a hole and put a seed in it.",
    ),
    "care": (
        "Every day {hero} gave it water. {friend} pulled out the weeds.",
        '{He} looked at it every morning. "Why is nothing there?" {he} asked. "You must wait," {said2} {friend}.',
        "When it was too hot, {hero} sat next to it, to give it some shade.",
        "One week passed, then two. {hero} was {sad}, because nothing happened.",
    ),
    "grow": (
        "{Sudden}, a tiny green leaf came out of the earth! {hero} {smiled}.",
        "After {number} days, there it was: a small {plant}. It grew and grew.",
        "In summer the {plant} was taller than {friend}. Even {elder} had never seen such a {nice} one.",
    ),
    "harvest": (
        '"It grew because you were patient," said {elder}.',
        "They showed the {plant} to everyone, and {elder} made {food} for all the children.",
        "{hero} gave a part of it to {friend}. It was their {plant}, after all.",
    ),
    "hungry": (
        "At noon {hero} wanted to eat {his} {food}. Then {he} saw that {friend} had nothing to eat.",
        "{friend} had dropped {his2} lunch in the mud. {He2} looked {sad}. {hero} still had {food}.",
        'A hungry {animal} had eaten the lunch of {friend}. "My {giver} gave me {food}," {said} {hero}.',
    ),
    "doubt": (
        "{hero} was hungry too. {He} thought about it for a moment.",
        '"If I share it, there is not enough for me," thought {hero}.',
        "There was not much of it, and it smelled {nice}.",
    ),
    "share": (
        'But {he} smiled. "Here, take half of it," {said} {hero}. "It is better together."',
        "Then {hero} made two equal parts and gave the first one to {friend}.",
        '"We can share," {said} {hero}. "Thank you!" {said2} {friend}.',
    ),
    "repay": (
        "The next day {hero} forgot {his} lunch. Now {friend} shared with {him}.",
        '{Later}, {friend} gave {him} {a_thing}. "It is for you, because you shared with me," {he2} {said2}.',
        "{Elder} saw it and brought them even more {food}.",
    ),
    "enter": (
        "{hero} wanted to win {race}. {He} practiced every day, even when it was {sky}.",
        'There was a sign at {place} about {race}. "I will try it," {said} {hero}. "Me too," {said2} {friend}.',
        "All year {hero} waited for {race}. The first prize was {a_thing}.",
    ),
    "compete": (
        "The day came. {hero} was doing {very} well, and everyone clapped.",
        "{Elder} rang a bell, and it began. {hero} was in front, and {friend} was right behind {him}.",
        "There were {number} children, but {hero} and {friend} were the best of them.",
    ),
    "stumble": (
        "{Sudden}, {friend} fell and hurt {his2} knee. {hero} could go on and win, or stop and help.",
        "Then {hero} saw that {friend} was in trouble. {His2} hand was bleeding.",
        "Right before the end, {friend} slipped and began to cry.",
    ),
    "help": (
        '{hero} did not think twice. {He} turned around and helped {him2}. "Thank you," {said2} {friend}.',
        '"Winning is not so important," thought {hero}, and {he} {went} back to {friend}.',
        "{hero} stopped at once. {He} put {his} scarf around the wound, and they finished together.",
    ),
    "judge": (
        "They came in last. But {elder} gave {hero} {a_thing} for being such a good friend.",
        "Another child won {race}, but everyone talked about what {hero} had done.",
        '"You did not win," said {elder}, "but I am {very} proud of you." {friend} gave {him} a hug.',
    ),
    "birthday": (
        "Soon it was {friend}'s birthday. {hero} wanted to make a surprise for {him2}.",
        '"Tomorrow is {friend}\'s birthday," {said} {hero}. "What can I give {him2}?"',
        "{hero} had a secret. {He} was planning a party for {friend} at {place}.",
    ),
    "prepare": (
        "With {elder}, {hero} made {food}. It took all day.",
        "{He} worked in {his} room with {part}, and nobody was allowed to come in.",
        "{hero} sold {his} old toys to buy {a_thing}.",
    ),
    "ignored": (
        'When {friend} wanted to play {game}, {hero} said, "I have no time." {friend} was {sad}.',
        "{friend} thought that everyone had forgotten {him2}. {He2} sat alone {near}.",
        '"Why does {hero} not talk to me?" {friend} asked {elder}. But {he3} only smiled.',
    ),
    "surprise": (
        '{Later}, {friend} came in, and everyone jumped up. "Happy birthday, {friend}!" they called.',
        "Then {hero} took {him2} to {place}. There were lights, {food}, and all {his2} friends!",
        '"Close your eyes," {said} {hero}. When {friend} opened them, {he2} saw {a_thing}.',
    ),
    "touched": (
        '"I thought you had forgotten me," said {friend}. "Never," {said} {hero}.',
        "{friend} {smiled}. It was the best birthday of {his2} life.",
        "They ate {food} and played {game} until it was dark.",
    ),
    "map": (
        "{Day}, {hero} found an old map {near}. There was a big cross on it. {He} showed it to {friend}.",
        'Inside an old book, {friend} found a map of {place}. "A treasure!" {he2} called.',
        '{Elder} gave {hero} and {friend} a map. "I made it when I was a child," {he3} said.',
    ),
    "clue": (
        "The map said: go past the {big} tree and turn left at the well.",
        "They had to count {number} steps from the gate and then look {near}.",
        "At the first mark they found {a_thing}. It was a clue!",
        'They {went} the wrong way twice. "Turn the map around," {said2} {friend}. That helped.',
    ),
    "dig": (
        "{hero} began to dig. {Sudden}, {he} hit something hard. It was a box!",
        "The cross was at a tree. They dug until their hands hurt, and there was a box.",
        "They lifted a heavy stone, and {friend} pulled out a box.",
    ),
    "chest": (
        "Inside was a surprise: {prize}! They {smiled}.",
        'They opened it {slow}. "Look, {prize}!" said {hero}. There was a note from {elder} too.',
        "In the box they found {prize}. They showed everything to {elder}.",
    ),
    "want": (
        '{friend} wanted to play with the {thing} too. "No, it is mine," said {hero}.',
        "Both of them wanted the {color} {thing}. {hero} pulled on one side, and {friend} on the other.",
        '"You always have the {thing}!" said {friend}. "It is my turn now." But {hero} did not give it away.',
    ),
    "quarrel": (
        '"I do not want to play with you any more!" shouted {hero}. {friend} went home. {He2} was {sad}.',
        "They did not speak to each other for a week. Without {friend}, {place} was boring.",
        "{hero} went home angry and kicked a stone. {Later}, {he} was only sad.",
    ),
    "regret": (
        '{Elder} asked what was wrong. "Toys cannot laugh with you," {he3} said.',
        "Playing alone with the {thing} was no fun. {hero} thought of {friend}.",
        '{hero} missed {friend}. "My {thing} is not a friend," {he} thought.',
    ),
    "makeup": (
        'So {hero} {went} to {friend}. "I am sorry," said {hero}. "Me too," {said2} {friend}.',
        "{hero} put the {color} {thing} in front of {friend}'s door, for both of them.",
        'They met {near}. "You can have it today," {said} {hero}, "and I take it tomorrow." "{yes}," {said2} {friend}.',
    ),
    "next": (
        "But the story does not end here.",
        "A week later, something else happened.",
        "Not long after that, they had another adventure.",
        "The next month, {hero} and {friend} met again.",
    ),
    "evening": (
        "{Night}, {hero} told {his} {giver} everything.",
        "{Night}, {hero} lay in bed and thought about {friend}. {He} fell asleep with a smile.",
        "{Night}, they ate {food} together and laughed about it.",
        "{Night}, it was cold outside, but {hero} felt warm inside.",
    ),
    "end": (
        "From then on, {hero} and {friend} were even better friends.",
        "{hero} never forgot that day.",
        "What a {nice} day it had been!",
        "And {hero}, the {trait} {kind}, was {very} {happy}.",
        "{hero} and {friend} still talk about it today.",
        "And they lived happily {home}.",
        "The end.",
    ),
}
_PLOTS = {
    "lost": "own go lose search? / comfort? search find",
    "accident": "break hide / advise confess forgive",
    "stray": "go stray feed? / feed owner reward",
    "fear": "go? afraid comfort? / encourage try brave",
    "storm": "go storm shelter / wait wait? calm",
    "build": "plan need / fail comfort? rebuild / enjoy",
    "garden": "seed care / care? grow harvest",
    "lunch": "go hungry doubt? / share repay",
    "race": "enter compete / stumble help / judge",
    "birthday": "birthday prepare / ignored surprise / touched",
    "treasure": "map go? / clue clue? dig / chest",
    "quarrel": "own want quarrel / regret makeup",
}

TRAITS = {name: values.split("/") for name, values in _TRAITS.items()}
"""What is drawn once for a story."""
MOTIVES = {name: values.split("/") for name, values in _MOTIVES.items()}
"""What is drawn once for a plot."""
WORDS = {name: values.split("/") for name, values in _WORDS.items()}
"""What is drawn at every use."""
PLOTS = [[paragraph.split() for paragraph in plot.split("/")] for plot in _PLOTS.values()]
"""The beats of each plot, by paragraph; one that ends in a question mark is told in half of the stories."""
OPENING, ENDING = ["open", "bond"], ["evening?", "end"]
"""The beats of the first and the last paragraph."""
