// What generated CUDA is compiled against to run on a CPU: cuda_emulator.cpp says how.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define uint unsigned int
#define uchar unsigned char
#define ushort unsigned short
#define CUDART_NAN_F NAN
using std::max;
using std::min;

static float rsqrtf(float x) { return 1 / sqrtf(x); }

typedef _Float16 half;

static half __float2half_rn(float x) { return x; }

struct uint4 {
  uint32_t x, y, z, w;
};

struct nv_bfloat16 {
  uint16_t bits;
  nv_bfloat16() = default;
  nv_bfloat16(float value) {  // to the nearest, ties to even
    uint32_t word;
    memcpy(&word, &value, 4);
    bits = value != value ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16;
  }
  operator float() const {
    uint32_t word = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
  }
};

struct Index {
  int x;
};

struct Buffer {
  const char* start;
  size_t bytes;
};

struct CUtensorMap {  // the arguments of cuTensorMapEncodeTiled from the address on
  uint64_t start, rank, fields[23];
};

extern Index threadIdx, blockIdx;
extern uint64_t (*exchange)[3];  // what each thread shows to its warp
extern char* shared_memory;

void __syncwarp();
void __syncthreads();
uint32_t cluster_rank();
void cluster_arrive();
void cluster_wait();
uint32_t cluster_address(uint32_t address, uint32_t rank);
int __any_sync(uint, int predicate);
uint32_t __cvta_generic_to_shared(void* pointer);
char* shared_address(uint32_t address, size_t bytes);
char* global_address(const void* address, size_t bytes);
void cp_async(uint32_t to, const void* from, uint32_t bytes = 16);
void commit_group();
void wait_group(size_t still_pending);
void cp_async_arrive(uint32_t barrier);
void ldmatrix(bool transposed, uint32_t** registers, uint32_t address);
uint32_t narrow_pair(bool bfloat, float high, float low);
void mma(bool bfloat, float** d, const uint32_t* a, const uint32_t* b, const float* c);
void mma_tf32(float** d, const uint32_t* a, const uint32_t* b, const float* c);
uint32_t round_tf32(float value);
void load_wgmma_a(uint32_t* a, uint64_t descriptor);
void wgmma(bool bfloat, int columns, float** d, const uint32_t* a, uint64_t descriptor, uint32_t accumulate,
           bool transposed);
void wgmma_commit();
void wgmma_wait(size_t still_running);
void read_shared(uint32_t address, size_t bytes);
void wrote_shared(uint32_t address, size_t bytes);
void fence_async();
void bar_arrive(uint32_t number, uint32_t threads);
void bar_sync(uint32_t number, uint32_t threads);
void mbarrier_init(uint32_t address, uint32_t count);
void mbarrier_arrive(uint32_t address, uint32_t count);
void mbarrier_expect(uint32_t address, uint32_t bytes);
void mbarrier_wait(uint32_t address, int parity);
void copy_box(uint32_t to, const void* map, std::initializer_list<int> first, uint32_t barrier);
void copy_line(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier);
uint32_t atomic_increment(const void* address, uint32_t limit);

template <class Value>
static Value __shfl_sync(uint, Value value, int lane, int) {
  memcpy(&exchange[threadIdx.x][0], &value, sizeof value);
  __syncwarp();
  memcpy(&value, &exchange[threadIdx.x / 32 * 32 + lane % 32][0], sizeof value);
  __syncwarp();
  return value;
}

template <class Value>
static Value __shfl_xor_sync(uint mask, Value value, int distance, int = 32) {
  return __shfl_sync(mask, value, threadIdx.x % 32 ^ distance, 32);
}

template <class Value>
static Value __shfl_up_sync(uint mask, Value value, int distance, int) {
  int lane = threadIdx.x % 32;
  return __shfl_sync(mask, value, lane < distance ? lane : lane - distance, 32);
}

// Two meetings of the warp, as for one shuffle: kernels that rank rows by ballots do little else.
static uint __ballot_sync(uint, int predicate) {
  exchange[threadIdx.x][0] = predicate != 0;
  __syncwarp();
  uint bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= (uint)exchange[threadIdx.x / 32 * 32 + lane][0] << lane;
  __syncwarp();
  return bits;
}

static int __popc(uint bits) { return __builtin_popcount(bits); }

// A thread runs until it waits, so nothing comes between.
template <class Value>
static Value atomicAdd(Value* address, Value value) {
  Value old = *address;
  *address += value;
  return old;
}

// Runs CTAs of a kernel, `cluster_size` together and then the next; nullptr, or what went wrong.
const char* run(void (*kernel)(), const Buffer* buffers, int n_buffers, const int* ctas, int n_ctas, int cluster_size,
                int n_threads, size_t shared_bytes);
