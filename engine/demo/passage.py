"""The text that the seeded checkpoint's tokenizer learns its merges from. Changing it changes the checkpoint."""

PASSAGE = """\
A server takes a question and gives back an answer, one word after another. The question comes over the network as
text; the tokenizer turns it into numbers; the engine puts those numbers through the layers of a model and gets back,
for every place in the text, how likely each next token is. One of them is chosen and sent, and then it is part of the
text, and the next one can be found. That is all there is to it, and it has to be done thousands of times a second for
hundreds of people at once, which is where the work begins.

The model is read from a folder of files. Its weights are the same for everyone, so the longest part of a step is to
read them, and it costs about the same for one request as for thirty. This is why requests are put together: each step
takes what is ready, a few new words of a long prompt here, the next token of an answer there, and gives each its turn.
What the model has already seen of a text is kept in blocks of memory, and when two texts begin with the same words
they share the blocks of that beginning. When there are no more free blocks, the request that came last waits, and goes
on later from where it was. Nothing is lost and nothing is said twice.

There is more than one way to choose. With a temperature of zero the most likely token is always the one that is taken.
With a higher temperature the others have their chance too; the numbers that decide are made from a seed and from the
position in the text, so that the same request can be made again and will be answered with the same words. An answer is
over when the model says so, when a stop string appears, or when there have been as many tokens as were asked for.

If something goes wrong with one request, that request gets an error that says what happened and what can be done about
it, and the others do not notice. If a client goes away, its blocks are free again within one step. If the process that
runs the model dies, another one is started and takes up the open requests from their prompts and from the tokens that
were already sent. The people who were reading see a pause, and then the next word.
"""
