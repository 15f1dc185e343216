// What generated CUDA needs to run on a CPU: threads as coroutines, and the PTX that the kernels use.
//
// A CTA's threads take turns and hand over at barriers and warp instructions, so a barrier that some thread never
// reaches is found.  The CTAs of a cluster run together, others one after another.  cp.async copies nothing before its wait, shared memory starts as NaN, and every address is
// checked: a copy read too early, an element read from nowhere or a misaligned vector fails.
#include "cuda_emulator.h"

#include <setjmp.h>
#include <ucontext.h>

#include <deque>
#include <map>
#include <vector>

struct Copy {
  uint32_t to;
  const void* from;
  uint32_t bytes;
};

struct Thread {
  ucontext_t start;
  jmp_buf resume;  // unlike swapcontext, a jump asks nothing of the operating system
  std::vector<char> stack;
  bool started, done;
  unsigned cluster_phase;  // in which it arrived at its cluster's barrier
  std::vector<Copy> open;                  // copies since the last commit
  std::vector<std::vector<Copy>> pending;  // committed groups, oldest first
};

struct Barrier {
  int arrived = 0;
  unsigned phase = 0;
};

struct MemoryBarrier {
  uint32_t expected, arrived, phase;
  int64_t bytes;  // that copies still owe
};

struct BoxCopy {
  uint32_t to;
  CUtensorMap from;
  int column, row;
  uint32_t barrier;
};

struct Cta {
  int index;
  std::vector<char> memory;
  char* shared_memory;
  std::vector<Thread> threads;
  std::vector<Barrier> warp_barriers;
  Barrier barrier;
  std::map<uint32_t, MemoryBarrier> memory_barriers;
  std::deque<BoxCopy> box_copies;  // under way
  uint64_t exchange[1024][3];
};

static const int RANK_SHIFT = 24;

Index threadIdx, blockIdx;
uint64_t (*exchange)[3];
char* shared_memory;

static std::vector<Cta> cluster;
static Cta* self;  // whose turn it is
static Barrier cluster_barrier;
static jmp_buf scheduler;
static std::vector<Buffer> buffers;  // all of global memory
static size_t shared_bytes;
static const char* failure;

static void leave() {
  if (!_setjmp(self->threads[threadIdx.x].resume)) _longjmp(scheduler, 1);
}

// Runs a thread until it leaves.
static void __attribute__((noinline)) enter(Thread& thread) {
  if (_setjmp(scheduler)) return;
  if (thread.started) _longjmp(thread.resume, 1);
  thread.started = true;
  setcontext(&thread.start);
}

static void fail(const char* what) {
  failure = what;
  for (;;) leave();
}

static void arrive(Barrier& barrier, int expected) {
  unsigned phase = barrier.phase;
  if (++barrier.arrived == expected) {
    barrier.arrived = 0;
    ++barrier.phase;
  }
  while (barrier.phase == phase) leave();
}

void __syncwarp() { arrive(self->warp_barriers[threadIdx.x / 32], 32); }
void __syncthreads() { arrive(self->barrier, self->threads.size()); }
uint32_t cluster_rank() { return self - cluster.data(); }

void cluster_arrive() {
  self->threads[threadIdx.x].cluster_phase = cluster_barrier.phase;
  if (++cluster_barrier.arrived < cluster.size() * self->threads.size()) return;
  cluster_barrier.arrived = 0;
  ++cluster_barrier.phase;
}

void cluster_wait() {
  while (cluster_barrier.phase == self->threads[threadIdx.x].cluster_phase) leave();
}

// As mapa gives them: a CTA's number in the cluster, counted from 1, and the address in its shared memory.
uint32_t cluster_address(uint32_t address, uint32_t rank) { return (rank + 1) << RANK_SHIFT | address; }

int __any_sync(uint, int predicate) {
  exchange[threadIdx.x][0] = predicate != 0;
  __syncwarp();
  int any = 0;
  for (int lane = 0; lane < 32; ++lane) any |= int(exchange[threadIdx.x / 32 * 32 + lane][0]);
  __syncwarp();
  return any;
}

uint32_t __cvta_generic_to_shared(void* pointer) { return (char*)pointer - shared_memory; }

char* shared_address(uint32_t address, size_t bytes) {
  uint32_t owner = address >> RANK_SHIFT;
  address &= (1 << RANK_SHIFT) - 1;
  if (owner > cluster.size()) fail("address in the shared memory of a CTA outside of the cluster");
  if (address + bytes > shared_bytes) fail("address outside of shared memory");
  if (address % bytes) fail("misaligned address in shared memory");
  return (owner ? cluster[owner - 1].shared_memory : shared_memory) + address;
}

char* global_address(const void* address, size_t bytes) {
  const char* start = (const char*)address;
  if ((uintptr_t)start % bytes) fail("misaligned address in global memory");
  for (const Buffer& b : buffers)
    if (start >= b.start && start + bytes <= b.start + b.bytes) return (char*)start;
  fail("address outside of every buffer");
  return nullptr;
}

void cp_async(uint32_t to, const void* from, uint32_t bytes) {
  shared_address(to, 16);
  if (bytes) global_address(from, 16);
  self->threads[threadIdx.x].open.push_back({to, from, bytes});
}

void commit_group() {
  Thread& thread = self->threads[threadIdx.x];
  thread.pending.push_back(thread.open);
  thread.open.clear();
}

void wait_group(size_t still_pending) {
  auto& pending = self->threads[threadIdx.x].pending;
  while (pending.size() > still_pending) {
    for (const Copy& c : pending.front()) {
      memset(shared_memory + c.to, 0, 16);
      memcpy(shared_memory + c.to, c.from, c.bytes);
    }
    pending.erase(pending.begin());
  }
}

// Four 8×8 matrices; lane l names row l % 8 of matrix l / 8, and receives elements 2 * (l % 4) and + 1 of row l / 4.
void ldmatrix(bool transposed, uint32_t** registers, uint32_t address) {
  int warp = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
  shared_address(address, 16);
  exchange[threadIdx.x][0] = address;
  __syncwarp();
  for (int m = 0; m < 4; ++m) {
    uint16_t pair[2];
    for (int i = 0; i < 2; ++i) {
      int row = lane / 4, column = lane % 4 * 2 + i;
      if (transposed) std::swap(row, column);
      memcpy(&pair[i], shared_memory + exchange[warp + m * 8 + row][0] + column * 2, 2);
    }
    memcpy(registers[m], pair, 4);
  }
  __syncwarp();
}

static float widen(bool bfloat, uint16_t bits) {
  half value;
  memcpy(&value, &bits, 2);
  return bfloat ? float(nv_bfloat16{bits}) : float(value);
}

static uint16_t narrow(bool bfloat, float value) {
  uint32_t word;
  memcpy(&word, &value, 4);
  if (bfloat) return std::isnan(value) ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16;
  half narrowed = (half)value;
  uint16_t bits;
  memcpy(&bits, &narrowed, 2);
  return bits;
}

uint32_t narrow_pair(bool bfloat, float high, float low) {
  return uint32_t(narrow(bfloat, high)) << 16 | narrow(bfloat, low);
}

// m16n8k16, fragments as in the PTX manual.
void mma(bool bfloat, float** d, const uint32_t* a, const uint32_t* b, const float* c) {
  int warp = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
  for (int i = 0; i < 2; ++i) exchange[threadIdx.x][i] = uint64_t(a[2 * i + 1]) << 32 | a[2 * i];
  exchange[threadIdx.x][2] = uint64_t(b[1]) << 32 | b[0];
  __syncwarp();
  auto element = [&](int owner, int group, int half_of, int odd) {
    return widen(bfloat, exchange[warp + owner][group] >> (32 * half_of + 16 * odd));
  };
  float result[4];
  for (int i = 0; i < 4; ++i) {
    int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    result[i] = c[i];
    for (int k = 0; k < 16; ++k)
      result[i] += element(row % 8 * 4 + k % 8 / 2, k / 8, row / 8, k % 2) *
                   element(column * 4 + k % 8 / 2, 2, k / 8, k % 2);
  }
  __syncwarp();
  for (int i = 0; i < 4; ++i) *d[i] = result[i];
}

static const char* swizzled(uint64_t descriptor, uint32_t offset) {
  if (descriptor >> 62 != 1 || descriptor >> 49 & 7) fail("the emulator knows wgmma with the 128-byte swizzle only");
  uint32_t address = ((descriptor & 0x3fff) << 4) + offset;
  return shared_address(address ^ (address >> 7 & 7) << 4, 2);
}

// The fragment of A that a lane would hold in registers, of a 64×16 operand in shared memory.
void load_wgmma_a(uint32_t* a, uint64_t descriptor) {
  int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  uint32_t group = (descriptor >> 32 & 0x3fff) << 4;
  for (int i = 0; i < 8; ++i) {
    int row = warp * 16 + i / 2 % 2 * 8 + lane / 4, k = i / 4 * 8 + lane % 4 * 2 + i % 2;
    memcpy((uint16_t*)a + i, swizzled(descriptor, row / 8 * group + row % 8 * 128 + k * 2), 2);
  }
}

// One warp's 16 of the 64 rows of wgmma m64nNk16, A in registers, B through a descriptor with the 128-byte swizzle.
void wgmma(bool bfloat, int columns, float** d, const uint32_t* a, uint64_t descriptor, uint32_t accumulate,
           bool transposed) {
  int warp = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
  uint32_t leading = (descriptor >> 16 & 0x3fff) << 4, group = (descriptor >> 32 & 0x3fff) << 4;
  for (int i = 0; i < 2; ++i) exchange[threadIdx.x][i] = uint64_t(a[2 * i + 1]) << 32 | a[2 * i];
  __syncwarp();
  for (int n = 0; n < columns / 8; ++n)
    for (int i = 0; i < 4; ++i) {
      int row = lane / 4 + i / 2 * 8, column = n * 8 + lane % 4 * 2 + i % 2;
      float result = accumulate ? *d[n * 4 + i] : 0;
      for (int k = 0; k < 16; ++k) {
        uint32_t offset = transposed ? column / 64 * leading + k / 8 * group + k % 8 * 128 + column % 64 * 2
                                      : column / 8 * group + column % 8 * 128 + k * 2;
        uint16_t bits;
        memcpy(&bits, swizzled(descriptor, offset), 2);
        uint64_t pair = exchange[warp + row % 8 * 4 + k % 8 / 2][k / 8];
        result += widen(bfloat, pair >> (32 * (row / 8) + 16 * (k % 2))) * widen(bfloat, bits);
      }
      *d[n * 4 + i] = result;
    }
  __syncwarp();
}

static MemoryBarrier& memory_barrier(uint32_t address) {
  if (!self->memory_barriers.count(address)) fail("no barrier was initialized at this address");
  return self->memory_barriers[address];
}

void mbarrier_init(uint32_t address, uint32_t count) {
  shared_address(address, 8);
  self->memory_barriers[address] = {count, 0, 0, 0};
}

static void mbarrier_check(MemoryBarrier& barrier) {
  if (barrier.arrived > barrier.expected) fail("more arrivals at a barrier than expected");
  if (barrier.arrived < barrier.expected || barrier.bytes != 0) return;
  barrier.arrived = 0;
  ++barrier.phase;
}

void mbarrier_arrive(uint32_t address, uint32_t count) {
  memory_barrier(address).arrived += count;
  mbarrier_check(memory_barrier(address));
}

void mbarrier_expect(uint32_t address, uint32_t bytes) {
  memory_barrier(address).bytes += bytes;
  mbarrier_arrive(address, 1);
}

void mbarrier_wait(uint32_t address, int parity) {
  while ((memory_barrier(address).phase & 1) == (uint32_t)parity) leave();
}

void copy_box(uint32_t to, const void* map, int column, int row, uint32_t barrier) {
  if (to % 1024) fail("a box with the 128-byte swizzle does not start at a multiple of 1024 bytes");
  self->box_copies.push_back({to, *(const CUtensorMap*)map, column, row, barrier});
}

// The oldest copy of the tensor memory accelerator: a row is 128 bytes with their swizzle, what is not there is zero.
static void finish_box_copy() {
  BoxCopy copy = self->box_copies.front();
  self->box_copies.pop_front();
  const CUtensorMap& m = copy.from;
  for (uint32_t row = 0; row < m.box_rows; ++row)
    for (uint32_t column = 0; column < m.box_columns; ++column) {
      uint64_t x = copy.column + column, y = copy.row + row;
      uint16_t bits = 0;
      if (x < m.columns && y < m.rows) memcpy(&bits, global_address((char*)m.start + y * m.pitch + x * 2, 2), 2);
      uint32_t address = copy.to + row * 128 + column * 2;
      memcpy(shared_address(address ^ (address >> 7 & 7) << 4, 2), &bits, 2);
    }
  memory_barrier(copy.barrier).bytes -= m.box_rows * m.box_columns * 2;
  mbarrier_check(memory_barrier(copy.barrier));
}

uint32_t atomic_increment(const void* address, uint32_t limit) {
  uint32_t* counter = (uint32_t*)global_address(address, 4);
  uint32_t old = *counter;
  *counter = old >= limit ? 0 : old + 1;
  return old;
}

static void (*kernel)();

static void run_thread() {
  kernel();
  self->threads[threadIdx.x].done = true;
  leave();
}

static void reset(Cta& cta, int index, int n_threads) {
  cta.index = index;
  cta.memory.assign(shared_bytes + 1024, (char)0xff);
  cta.shared_memory = (char*)(((uintptr_t)cta.memory.data() + 1023) / 1024 * 1024);
  cta.barrier = Barrier();
  cta.warp_barriers.assign(n_threads / 32, Barrier());
  cta.memory_barriers.clear();
  cta.box_copies.clear();
  cta.threads.resize(n_threads);
  for (Thread& t : cta.threads) {
    t.stack.resize(1 << 16);
    t.started = t.done = false;
    t.open.clear();
    t.pending.clear();
    getcontext(&t.start);
    t.start.uc_stack.ss_sp = t.stack.data();
    t.start.uc_stack.ss_size = t.stack.size();
    t.start.uc_link = nullptr;
    makecontext(&t.start, run_thread, 0);
  }
}

// A turn of each thread of a CTA that still runs; their number.
static int take_turns(Cta& cta) {
  self = &cta;
  exchange = cta.exchange;
  shared_memory = cta.shared_memory;
  blockIdx.x = cta.index;
  int left = 0, n_threads = cta.threads.size();
  for (threadIdx.x = 0; threadIdx.x < n_threads && !failure; ++threadIdx.x) {
    if (cta.threads[threadIdx.x].done) continue;
    ++left;
    enter(cta.threads[threadIdx.x]);
  }
  if (!cta.box_copies.empty()) finish_box_copy();
  return left;
}

// Runs the CTAs of one cluster; nullptr, or what went wrong.
static const char* run_cluster(const int* ctas, int n_threads) {
  failure = nullptr;
  cluster_barrier = Barrier();
  for (Cta& cta : cluster) reset(cta, *ctas++, n_threads);
  for (int left = 1, rounds = 0; left; ++rounds) {
    if (rounds > 1000000) return "some threads wait for ever at a barrier";
    left = 0;
    for (Cta& cta : cluster) {
      left += take_turns(cta);
      if (failure) return failure;
    }
  }
  return nullptr;
}

const char* run(void (*kernel_)(), const Buffer* buffers_, int n_buffers, const int* ctas, int n_ctas, int cluster_size,
                int n_threads, size_t shared) {
  kernel = kernel_;
  buffers.assign(buffers_, buffers_ + n_buffers);
  shared_bytes = shared;
  cluster.resize(cluster_size);
  for (int i = 0; i < n_ctas; i += cluster_size)
    if (const char* failed = run_cluster(ctas + i, n_threads)) return failed;
  return nullptr;
}
