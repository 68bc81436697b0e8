"""Chapter 5: what it asks for, and how it helps."""

from chapters.catalog import Chapter, Task

CHAPTER = Chapter(
    number=5,
    name="ch05_model_runner",
    title="Model runner and sampler",
    minutes=150,
    builds="an engine of your own that answers a question with a real language model",
    needs=(),
    tasks=(
        Task(
            number="5.1",
            title="A step as tensors",
            contract={
                "C5.1": "the rows are one token for each decode, its newest, and then all tokens of"
                " each prefill, in the step's order",
                "C5.2": "a row's position counts from the start of its own sequence: num_tokens - 1"
                " for a decode, 0, 1, 2 ... for a prefill",
                "C5.3": "a row is written to the slot that the pool gives for its position",
                "C5.4": "query_starts is 0 and then the number of rows up to the end of each"
                " sequence",
                "C5.5": "a context is num_tokens long, for a decode too: its row sees all that is"
                " cached and itself",
                "C5.6": "line i of block_tables is the table of sequence i, in the order of the"
                " rows",
            },
            hints=(
                "A running sequence has 7 tokens, and 6 of them are computed. Which token goes"
                " through the network now, at which position, and how many keys will it see?",
                "Decodes and prefills differ in one number: the first position they compute."
                " Make a list of those starts beside the list of sequences, and let one loop treat"
                " them alike. Look at the table at the top of the file: every line of it is one"
                " list to build.",
                "for sequence, start in zip(sequences, starts): with end = sequence.num_tokens,"
                " add token_ids[start:end], range(start, end) and"
                " pool.slot_mapping(sequence, start, end), then append len(token_ids) to"
                " query_starts. Context lengths are the ends. make_batch does the rest.",
            ),
        ),
        Task(
            number="5.2",
            title="The rows that give logits",
            contract={
                "C5.7": "last_rows is the index of the last row of each sequence",
                "C5.8": "next_logits gives one row of scores a sequence, computed from its last"
                " row's hidden state",
                "C5.9": "the model's head is asked once, for the last rows and no others",
            },
            hints=(
                "A prompt of 1,000 tokens gives 1,000 rows. What would the scores after its third"
                " token be good for?",
                "query_starts says where each sequence begins, and so where the one before it has"
                " ended. Its first entry, 0, ends nothing.",
                "last_rows: query_starts[1:] - 1, as int64. next_logits: model.hidden(batch), take"
                " those rows of it, and only they go into model.logits.",
            ),
        ),
        Task(
            number="5.3",
            title="Choose a token",
            contract={
                "C5.10": "temperature 0 takes the largest logit, the lowest id on a tie, and draws"
                " nothing",
                "C5.11": "entry i is the probability of token id i: the softmax of the logits"
                " divided by the temperature",
                "C5.12": "top_k keeps exactly the top_k likeliest tokens; 0 or more than there are"
                " keeps all",
                "C5.13": "top_p keeps the likeliest tokens until they reach top_p together, the"
                " one that reaches it included: never none",
                "C5.14": "temperature, then top_k, then top_p of what is left; then what is kept"
                " sums to 1",
                "C5.15": "sample draws from probabilities() with the generator it is given",
            },
            hints=(
                "Softmax 0.5, 0.3, 0.15, 0.05 and top_p = 0.6: the first token alone has less, the"
                " first two have more. Which rule keeps two of them, and what does the same rule"
                " do with top_p = 0.2?",
                "Sort once, by falling score, and remember the order: top_k and top_p are both a"
                " cut in that order. For top_p ask of every token how much the tokens before it"
                " have together. scatter puts the result back to token ids.",
                "scores, order = (logits / temperature).sort(descending=True, stable=True);"
                " scores[top_k:] = -inf; kept = scores.softmax(-1);"
                " before = kept.cumsum(-1) - kept; zero where before >= top_p;"
                " divide by the sum; torch.zeros_like(kept).scatter(0, order, kept).",
            ),
        ),
        Task(
            number="5.4",
            title="One token for each sequence",
            contract={
                "C5.16": "execute returns one token a sequence, in the order given, each chosen"
                " from its own row by its own params",
                "C5.17": "a request's tokens do not depend on which others are in the batch, or on"
                " how often it was preempted",
                "C5.18": "another seed draws other numbers, and so does each next token of one"
                " sequence",
            },
            hints=(
                "Two requests, both with seed 7, share one generator. The first gets the first"
                " random number and the second gets the second. What does the second request get"
                " when it is alone?",
                "A generator that lives as long as its request would do, but somebody must keep it"
                " and throw it away. One that is made for a single draw needs no keeping: give it"
                " a seed made of all that the draw may depend on.",
                "generator_for: torch.Generator().manual_seed(hash((params.seed, num_tokens))),"
                " which returns the generator. execute: zip the rows of next_logits with the"
                " sequences, and sample(row, sequence.params, generator_for(sequence)).",
            ),
        ),
    ),
)
