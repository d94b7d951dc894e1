"""Where an epoch's windows come from: one small class a kind of source, each with its own place and its restoring.

======================  ==============  =====================================  ========================================
feed                    file            when                                   its place in the epoch
======================  ==============  =====================================  ========================================
:class:`HandedOutFeed`  ``handed_out``  nothing is known of the samples        what was handed out, what is still to be
:class:`ExactFeed`      ``planned``     lengths were seen in an earlier epoch  the next request of the plan
:class:`RoughFeed`      ``planned``     lengths are hinted at, or change       the next request of the plan
:class:`UpdateFeed`     ``updates``     ``samples_per_update`` is set          where the next update begins
:class:`BatchesFeed`    ``batches``     the user gives batches                 the number of the next batch
:class:`StreamFeed`     ``stream``      the dataset is iterable                where each worker stands
======================  ==============  =====================================  ========================================
"""
