"""What a run will cost, found without doing it: memory, bytes and seconds a round on any number of nodes.

Three parts meet in `hpcfed.planning.plan`:

- a *profile* of the machine (`hpcfed.planning.profile`), measured once by ``hpcfed doctor --measure``;
- a *rehearsal* (`hpcfed.planning.rehearsal`): one rank's part of a few rounds, done by this process alone, in which the
  method's own code computes, and says what it would send;
- a *model of the network* (`hpcfed.planning.network`), which gives each of these messages a time.
"""
