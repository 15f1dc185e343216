// What generated CUDA needs to run on a CPU: threads as coroutines, and the PTX that the kernels use.
//
// A CTA's threads take turns and hand over at barriers and warp instructions, so a barrier that some thread never
// reaches is found.  The CTAs of a cluster run together, others one after another.  What is asynchronous takes as long
// as it may: cp.async copies nothing before its wait, a bulk copy makes its destination NaN at once and ends some time
// later, a wgmma keeps its operands until its wait and its accumulators are NaN till then.  Warps pause now and then.
// Shared memory starts as NaN, and every address is checked.  So what is read too early or overwritten too early, an
// element read from nowhere or a misaligned vector fails.
#include "cuda_emulator.h"

#include <setjmp.h>
#include <ucontext.h>

#include <functional>
#include <map>
#include <vector>

struct Copy {
  uint32_t to;
  const void* from;
  uint32_t bytes;
};

struct Range {
  uint32_t start, bytes;
};

struct Accumulators {
  std::vector<float*> registers;
  std::vector<float> values;  // that they have when the products end
};

struct Products {  // of a group
  std::vector<Range> operands;
  std::vector<Accumulators> accumulators;
};

struct Thread {
  ucontext_t start;
  jmp_buf resume;  // unlike swapcontext, a jump asks nothing of the operating system
  std::vector<char> stack;
  bool started, done;
  unsigned cluster_phase;  // in which it arrived at its cluster's barrier
  std::vector<Copy> open;                  // copies since the last commit
  std::vector<std::vector<Copy>> pending;  // committed groups, oldest first
  Products products;                       // since the last commit
  std::vector<Products> running;           // committed groups, oldest first
  uint32_t fences;                         // for the async proxy, so far
  unsigned named_phase[16];                // of each named barrier, one more than the last in which it arrived
};

struct Barrier {
  int arrived = 0;
  unsigned phase = 0;
  int expected = 0;
};

struct MemoryBarrier {
  uint32_t expected, arrived, phase;
  int64_t bytes;  // that copies still owe
};

struct BulkCopy {
  uint32_t bytes, barrier;
  std::function<void()> finish;
};

struct Access {  // to a word in shared memory
  int thread;
  uint32_t fences;  // of the thread before it
};

struct Cta {
  int index;
  std::vector<char> memory;
  char* shared_memory;
  std::vector<Thread> threads;
  std::vector<Barrier> warp_barriers;
  Barrier barrier, named_barriers[16];
  std::map<uint32_t, MemoryBarrier> memory_barriers;
  std::vector<BulkCopy> bulk_copies;       // under way
  std::vector<Access> writes;              // the last of each word
  std::vector<std::vector<Access>> reads;  // of each word since the last copy to it
  bool slow_copies;                        // they end where all threads wait for them
  std::vector<uint32_t> asleep;            // rounds for which each warp does nothing
  uint64_t exchange[1024][3];
};

static const int RANK_SHIFT = 24;
static const uint32_t PAUSE = 256;  // rounds between the pauses of a warp, and their length

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
static bool moved;     // whether a thread did anything but wait, or a copy ended
static uint32_t dice;  // for the order of what has none

static uint32_t roll(uint32_t sides) {
  dice = dice * 1664525 + 1013904223;
  return (dice >> 16) % sides;
}

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

template <class Condition>
static void wait_while(Condition condition) {
  moved = true;
  while (condition()) leave();
  moved = true;
}

static void arrive(Barrier& barrier, int expected) {
  if (++barrier.arrived < expected) return;
  barrier.arrived = 0;
  ++barrier.phase;
}

static void sync(Barrier& barrier, int expected) {
  unsigned phase = barrier.phase;
  arrive(barrier, expected);
  wait_while([&] { return barrier.phase == phase; });
}

void __syncwarp() { sync(self->warp_barriers[threadIdx.x / 32], 32); }
void __syncthreads() { sync(self->barrier, self->threads.size()); }

static Barrier& named_barrier(uint32_t number, uint32_t threads) {
  if (number > 15 || threads % 32 || threads > self->threads.size()) fail("no such named barrier");
  Barrier& barrier = self->named_barriers[number];
  if (barrier.arrived && barrier.expected != (int)threads) fail("threads disagree on how many meet at a named barrier");
  unsigned& last = self->threads[threadIdx.x].named_phase[number];
  if (last == barrier.phase + 1) fail("a thread arrives at a named barrier twice before the others do");
  last = barrier.phase + 1;
  barrier.expected = threads;
  return barrier;
}

void bar_arrive(uint32_t number, uint32_t threads) { arrive(named_barrier(number, threads), threads); }
void bar_sync(uint32_t number, uint32_t threads) { sync(named_barrier(number, threads), threads); }
uint32_t cluster_rank() { return self - cluster.data(); }

void cluster_arrive() {
  self->threads[threadIdx.x].cluster_phase = cluster_barrier.phase;
  if (++cluster_barrier.arrived < cluster.size() * self->threads.size()) return;
  cluster_barrier.arrived = 0;
  ++cluster_barrier.phase;
}

void cluster_wait() {
  wait_while([] { return cluster_barrier.phase == self->threads[threadIdx.x].cluster_phase; });
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
  nv_bfloat16 brain;
  brain.bits = bits;
  return bfloat ? float(brain) : float(value);
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

static float tf32(uint32_t word) {
  if (word & 0x1fff) fail("an operand has bits that tf32 has not");
  float value;
  memcpy(&value, &word, 4);
  return value;
}

// m16n8k8 of tf32, fragments as in the PTX manual.
void mma_tf32(float** d, const uint32_t* a, const uint32_t* b, const float* c) {
  int warp = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
  for (int i = 0; i < 2; ++i) exchange[threadIdx.x][i] = uint64_t(a[2 * i + 1]) << 32 | a[2 * i];
  exchange[threadIdx.x][2] = uint64_t(b[1]) << 32 | b[0];
  __syncwarp();
  float result[4];
  for (int i = 0; i < 4; ++i) {
    int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    result[i] = c[i];
    for (int k = 0; k < 8; ++k)
      result[i] += tf32(exchange[warp + row % 8 * 4 + k % 4][k / 4] >> (32 * (row / 8))) *
                   tf32(exchange[warp + column * 4 + k % 4][2] >> (32 * (k / 4)));
  }
  __syncwarp();
  for (int i = 0; i < 4; ++i) *d[i] = result[i];
}

// To the nearest tf32, away from zero if two are as near; the bits of NaN are those that GPUs give.
uint32_t round_tf32(float value) {
  uint32_t word;
  memcpy(&word, &value, 4);
  if (std::isnan(value)) return 0x7fffe000;
  return std::isinf(value) ? word : (word + 0x1000) & 0xffffe000;
}

// The address of an element in rows of `pitch` bytes, 128, 64 or 32, with the XOR swizzle of that width.
static uint32_t swizzled(uint32_t address, uint32_t pitch) { return address ^ (address >> 7 & (pitch / 16 - 1)) << 4; }

struct Matrix {  // as a descriptor describes it
  uint32_t start, leading, group, pitch;

  explicit Matrix(uint64_t descriptor) {
    if (!(descriptor >> 62) || descriptor >> 49 & 7) fail("the emulator knows wgmma with a swizzle and no offset only");
    start = (descriptor & 0x3fff) << 4;
    leading = (descriptor >> 16 & 0x3fff) << 4;
    group = (descriptor >> 32 & 0x3fff) << 4;
    pitch = 256 >> (descriptor >> 62);
  }

  const char* element(uint32_t offset) const { return shared_address(swizzled(start + offset, pitch), 2); }

  // The bytes from group `first` of 8 rows to the end of `groups`, in each of `panels`.
  Range range(uint32_t first, uint32_t groups, uint32_t panels) const {
    return {start / pitch * pitch + first * group, (panels - 1) * leading + (groups - 1) * group + 8 * pitch};
  }
};

static void keep_operand(Range range) {
  if (threadIdx.x % 32 == 0) self->threads[threadIdx.x].products.operands.push_back(range);
}

// The fragment of A that a lane would hold in registers, of a 64×16 operand in shared memory.
void load_wgmma_a(uint32_t* a, uint64_t descriptor) {
  int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  Matrix m(descriptor);
  for (int i = 0; i < 8; ++i) {
    int row = warp * 16 + i / 2 % 2 * 8 + lane / 4, k = i / 4 * 8 + lane % 4 * 2 + i % 2;
    memcpy((uint16_t*)a + i, m.element(row / 8 * m.group + row % 8 * m.pitch + k * 2), 2);
  }
  keep_operand(m.range(0, 8, 1));  // of all four warps, which multiply together
}

// One warp's 16 of the 64 rows of wgmma m64nNk16, A in registers, B through a descriptor.
void wgmma(bool bfloat, int columns, float** d, const uint32_t* a, uint64_t descriptor, uint32_t accumulate,
           bool transposed) {
  int warp = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
  Thread& thread = self->threads[threadIdx.x];
  Matrix b(descriptor);
  int panel = b.pitch / 2;
  for (Products& group : thread.running)  // accumulators of products that follow one another need no wait
    for (size_t i = 0; i < group.accumulators.size(); ++i) {
      Accumulators& x = group.accumulators[i];
      if (x.registers[0] != d[0]) continue;
      for (size_t j = 0; j < x.values.size(); ++j) *x.registers[j] = x.values[j];
      group.accumulators.erase(group.accumulators.begin() + i--);
    }
  for (int i = 0; i < 2; ++i) exchange[threadIdx.x][i] = uint64_t(a[2 * i + 1]) << 32 | a[2 * i];
  __syncwarp();
  float rows[2][16], column[16];
  for (int r = 0; r < 2; ++r)
    for (int k = 0; k < 16; ++k)
      rows[r][k] = widen(bfloat, exchange[warp + lane / 4 * 4 + k % 8 / 2][k / 8] >> (32 * r + 16 * (k % 2)));
  for (int i = 0; i < columns / 4; ++i) {
    int n = i / 2 * 8 + lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      uint32_t offset = transposed ? n / panel * b.leading + k / 8 * b.group + k % 8 * b.pitch + n % panel * 2
                                   : n / 8 * b.group + n % 8 * b.pitch + k * 2;
      uint16_t bits;
      memcpy(&bits, b.element(offset), 2);
      column[k] = widen(bfloat, bits);
    }
    for (int r = 0; r < 2; ++r) {
      float& result = *d[i / 2 * 4 + r * 2 + i % 2];
      if (!accumulate) result = 0;
      for (int k = 0; k < 16; ++k) result += rows[r][k] * column[k];
    }
  }
  keep_operand(transposed ? b.range(0, 2, (columns + panel - 1) / panel) : b.range(0, columns / 8, 1));
  auto& open = thread.products.accumulators;
  if (std::none_of(open.begin(), open.end(), [&](const Accumulators& x) { return x.registers[0] == d[0]; }))
    open.push_back({std::vector<float*>(d, d + columns / 2), {}});
  __syncwarp();
}

void wgmma_commit() {
  Thread& thread = self->threads[threadIdx.x];
  for (Accumulators& x : thread.products.accumulators)
    for (float* r : x.registers) {
      x.values.push_back(*r);
      *r = NAN;
    }
  thread.running.push_back(std::move(thread.products));
  thread.products = Products();
}

void wgmma_wait(size_t still_running) {
  auto& running = self->threads[threadIdx.x].running;
  while (running.size() > still_running) {
    for (Accumulators& x : running.front().accumulators)
      for (size_t i = 0; i < x.values.size(); ++i) *x.registers[i] = x.values[i];
    running.erase(running.begin());
  }
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
  wait_while([=] { return (memory_barrier(address).phase & 1) == (uint32_t)parity; });
}

static bool multiplied(uint32_t address, uint32_t bytes) {
  for (size_t i = 0; i < self->threads.size(); i += 32) {
    const Thread& t = self->threads[i];
    for (size_t group = 0; group <= t.running.size(); ++group)
      for (const Range& r : (group < t.running.size() ? t.running[group] : t.products).operands)
        if (address < r.start + r.bytes && r.start < address + bytes) return true;
  }
  return false;
}

void wrote_shared(uint32_t address, size_t bytes) {
  if (address >> RANK_SHIFT) return;
  if (multiplied(address, bytes)) fail("a thread overwrites what a product reads");
  for (size_t i = 0; i < bytes / 4; ++i)
    self->writes[address / 4 + i] = {(int)threadIdx.x, self->threads[threadIdx.x].fences};
}

void read_shared(uint32_t address, size_t bytes) {
  if (address >> RANK_SHIFT) return;
  for (size_t i = 0; i < bytes / 4; ++i)
    self->reads[address / 4 + i].push_back({(int)threadIdx.x, self->threads[threadIdx.x].fences});
}

void fence_async() { ++self->threads[threadIdx.x].fences; }

static void start_copy(uint32_t to, uint32_t bytes, uint32_t barrier, std::function<void()> finish) {
  shared_address(to, 16);
  shared_address(to + bytes - 16, 16);
  if (multiplied(to, bytes)) fail("a copy overwrites what a product reads");
  for (uint32_t i = to / 4; i < (to + bytes) / 4; ++i) {
    Access& w = self->writes[i];
    if (w.thread >= 0 && self->threads[w.thread].fences == w.fences)
      fail("a copy overwrites what a thread wrote without a fence for the async proxy");
    w.thread = -1;
    for (const Access& r : self->reads[i])
      if (self->threads[r.thread].fences == r.fences)
        fail("a copy overwrites what a thread read without a fence for the async proxy");
    self->reads[i].clear();
  }
  memset(shared_memory + to, 0xff, bytes);
  self->bulk_copies.push_back({bytes, barrier, finish});
}

// A copy of the tensor memory accelerator: what is not there is zero.
void copy_box(uint32_t to, const void* map, std::initializer_list<int> first, uint32_t barrier) {
  CUtensorMap m = *(const CUtensorMap*)map;
  if (first.size() != m.rank) fail("a copy has not the rank of its map");
  const uint64_t *sizes = m.fields, *strides = sizes + m.rank, *box = strides + m.rank - 1, *modes = box + 2 * m.rank;
  uint32_t pitch = 16 << modes[1], rows = 1;
  if (pitch != box[0] * 2) fail("the emulator knows boxes with rows as wide as their swizzle only");
  if (to % (8 * pitch)) fail("a box does not start where its swizzle does");
  for (uint32_t i = 1; i < m.rank; ++i) rows *= box[i];
  std::vector<int> begin(first);
  start_copy(to, rows * pitch, barrier, [=] {
    const uint64_t *sizes = m.fields, *strides = sizes + m.rank, *box = strides + m.rank - 1;
    for (uint32_t row = 0; row < rows; ++row) {
      const char* from = (const char*)m.start;
      bool there = true;
      for (uint32_t i = 1, rest = row; i < m.rank; rest /= box[i++]) {
        int64_t x = begin[i] + int64_t(rest % box[i]);
        there &= x >= 0 && x < int64_t(sizes[i]);
        from += x * int64_t(strides[i - 1]);
      }
      for (uint32_t column = 0; column < box[0]; ++column) {
        int64_t x = begin[0] + int64_t(column);
        uint16_t bits = 0;
        if (there && x >= 0 && x < int64_t(sizes[0])) memcpy(&bits, global_address(from + x * 2, 2), 2);
        memcpy(shared_address(swizzled(to + row * pitch + column * 2, pitch), 2), &bits, 2);
      }
    }
  });
}

void copy_line(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  if (bytes % 16) fail("a line of bytes is not whole chunks of 16");
  global_address(from, 16);
  start_copy(to, bytes, barrier, [=] {
    for (uint32_t i = 0; i < bytes; i += 16) memcpy(shared_address(to + i, 16), global_address((char*)from + i, 16), 16);
  });
}

// Arrives when the copies by cp.async that the thread has started, and not committed, have ended.
void cp_async_arrive(uint32_t barrier) {
  std::vector<Copy>& open = self->threads[threadIdx.x].open;
  for (const Copy& c : open) {
    if (multiplied(c.to, 16)) fail("a copy overwrites what a product reads");
    memset(shared_memory + c.to, 0xff, 16);
  }
  self->bulk_copies.push_back({0, barrier, [barrier, copies = open] {
    for (const Copy& c : copies) {
      memset(shared_memory + c.to, 0, 16);
      memcpy(shared_memory + c.to, c.from, c.bytes);
    }
    ++memory_barrier(barrier).arrived;
  }});
  open.clear();
}

// Ends one of the copies that are under way: their order is not that in which they started.
static void finish_copy() {
  auto& copies = self->bulk_copies;
  auto chosen = copies.begin() + roll(copies.size());
  BulkCopy copy = *chosen;
  copies.erase(chosen);
  copy.finish();
  memory_barrier(copy.barrier).bytes -= copy.bytes;
  mbarrier_check(memory_barrier(copy.barrier));
  moved = true;
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
  if (!self->threads[threadIdx.x].running.empty()) fail("a thread ends before its products do");
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
  for (Barrier& b : cta.named_barriers) b = Barrier();
  cta.bulk_copies.clear();
  cta.slow_copies = roll(2);
  cta.asleep.assign(n_threads / 32, 0);
  cta.writes.assign(shared_bytes / 4 + 1, Access{-1, 0});
  cta.reads.assign(shared_bytes / 4 + 1, {});
  cta.threads.resize(n_threads);
  for (Thread& t : cta.threads) {
    t.stack.resize(1 << 16);
    t.started = t.done = false;
    t.open.clear();
    t.pending.clear();
    t.products = Products();
    t.running.clear();
    t.fences = 0;
    std::fill(t.named_phase, t.named_phase + 16, 0);
    getcontext(&t.start);
    t.start.uc_stack.ss_sp = t.stack.data();
    t.start.uc_stack.ss_size = t.stack.size();
    t.start.uc_link = nullptr;
    makecontext(&t.start, run_thread, 0);
  }
}

// A turn of each thread of a CTA that still runs and is not asleep; the number that run.
static int take_turns(Cta& cta, bool all) {
  self = &cta;
  exchange = cta.exchange;
  shared_memory = cta.shared_memory;
  blockIdx.x = cta.index;
  int left = 0, n_threads = cta.threads.size();
  for (threadIdx.x = 0; threadIdx.x < n_threads && !failure; ++threadIdx.x) {
    uint32_t& asleep = cta.asleep[threadIdx.x / 32];
    if (threadIdx.x % 32 == 0) asleep = all ? 0 : asleep ? asleep - 1 : roll(PAUSE) ? 0 : roll(PAUSE);
    if (cta.threads[threadIdx.x].done) continue;
    ++left;
    if (!asleep) enter(cta.threads[threadIdx.x]);
  }
  if (!cta.bulk_copies.empty() && !failure && (all || !cta.slow_copies)) finish_copy();
  return left;
}

// Runs the CTAs of one cluster; nullptr, or what went wrong.
static const char* run_cluster(const int* ctas, int n_threads) {
  failure = nullptr;
  cluster_barrier = Barrier();
  for (Cta& cta : cluster) reset(cta, *ctas++, n_threads);
  bool all = false;
  for (int left = 1; left;) {
    left = 0;
    moved = false;
    for (Cta& cta : cluster) {
      left += take_turns(cta, all);
      if (failure) return failure;
    }
    if (left && all && !moved) return "some threads wait for ever at a barrier";
    all = !moved;
  }
  return nullptr;
}

const char* run(void (*kernel_)(), const Buffer* buffers_, int n_buffers, const int* ctas, int n_ctas, int cluster_size,
                int n_threads, size_t shared) {
  kernel = kernel_;
  buffers.assign(buffers_, buffers_ + n_buffers);
  shared_bytes = shared;
  cluster.resize(cluster_size);
  dice = 0;
  for (int i = 0; i < n_ctas; ++i) dice = dice * 31 + ctas[i];
  for (int i = 0; i < n_ctas; i += cluster_size)
    if (const char* failed = run_cluster(ctas + i, n_threads)) return failed;
  return nullptr;
}
