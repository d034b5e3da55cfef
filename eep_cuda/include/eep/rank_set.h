// How many ranks there may be, and a set of them. Plain C; what is done with sets is in src/common/rank_sets.h.
#ifndef EEP_RANK_SET_H_
#define EEP_RANK_SET_H_

#include <stdint.h>

#define EEP_MAX_RANKS 512
#define EEP_MAX_CUDA_RANKS 64  // the kernels of a GPU know the first word of a set only
#define EEP_RANK_WORDS 8       // of 64 ranks each

// Bit r % 64 of word r / 64 stands for rank r. Where several write to one, each word is changed atomically: what is
// said of two ranks may be seen one after the other.
typedef struct {
  uint64_t words[EEP_RANK_WORDS];
} eep_rank_set;

#endif  // EEP_RANK_SET_H_
