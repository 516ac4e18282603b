// Kernels for any processor, as far as the compiler's own vectors take it.
#define COCONET_ISA portable
#define COCONET_ISA_NAME "portable"
#include "cpu/kernels_impl.h"
