// Every collective against values computed here, in the whole world and in parts of it.
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <chrono>
#include <numeric>
#include <thread>
#include "tests/parallel/world.h"

namespace pith::test {
namespace {
// The groups that the tests run in: all ranks, even and odd ones, this rank alone.
std::vector<Comm> groups() {
  static const std::vector<Comm> made = [] {
    std::vector<int64_t> same_parity;
    for (int64_t rank = world().rank() % 2; rank < world().size(); rank += 2)
      same_parity.push_back(rank);
    return std::vector<Comm>{world().all(), world().group(same_parity, "parity"),
      world().group({world().rank()}, "alone")};
  }();
  return made;
}

// (rows, 3), distinct for each (rank, row); small whole numbers and exact in BF16.
Tensor rows_of(int64_t rank, int64_t rows, at::ScalarType dtype) {
  const Tensor base = arange(rows * 3, at::kLong).remainder(13).reshape({rows, 3});
  return (base + 16 * rank).to(dtype);
}

// The received rows.
Tensor all_to_all(const Comm& comm, const Tensor& in, const std::vector<int64_t>& recv,
  const std::vector<int64_t>& send) {
  Tensor out = zeros({std::reduce(recv.begin(), recv.end()), 3}, in.scalar_type());
  comm.all_to_all_async(out, in, recv, send).wait();
  return out;
}

const std::vector<at::ScalarType> kTypes{
  at::kFloat, at::kDouble, at::kBFloat16, at::kLong, at::kInt};

TEST(Comm, KnowsItsMembers) {
  const Comm all = groups()[0], parity = groups()[1];
  EXPECT_EQ(all.size(), world().size());
  EXPECT_EQ(all.rank(), world().rank());
  EXPECT_EQ(parity.rank(), world().rank() / 2);
  EXPECT_EQ(parity.ranks()[static_cast<size_t>(parity.rank())], world().rank());
  EXPECT_EQ(parity.name(), "parity");
  EXPECT_EQ(Comm().size(), 1);
  EXPECT_EQ(Comm().rank(), 0);
}

TEST(Comm, AllReduce) {
  for (const Comm& comm: groups()) {
    for (const auto dtype: kTypes) {
      for (const int64_t rows: {0, 1, 7}) {
        Tensor sum = rows_of(comm.rank(), rows, dtype);
        Tensor expected = zeros({rows, 3}, at::kDouble);
        for (int64_t i = 0; i < comm.size(); ++i) expected += rows_of(i, rows, at::kDouble);
        comm.all_reduce(sum);
        EXPECT_TRUE(at::equal(sum, expected.to(dtype))) << comm.name() << ' ' << dtype;
      }
    }
  }
}

// BF16 holds 8 bits: 256 + 1 + 1 is 256 in BF16 sums, 258 when summed in FP32.
TEST(Comm, BFloat16IsSummedInFloat32) {
  const Comm all = groups()[0];
  const int64_t n = all.size();
  Tensor x = full({4}, all.rank() == 0 ? 256.0 : 1.0, at::kBFloat16);
  const Tensor in = x.repeat(n);
  Tensor part = zeros({4}, at::kFloat);
  all.reduce_scatter_async(part, in).wait();
  EXPECT_TRUE(at::equal(part, full({4}, 255.0 + static_cast<double>(n), at::kFloat)));
  all.all_reduce(x);
  EXPECT_TRUE(
    at::equal(x, full({4}, 255.0 + static_cast<double>(n), at::kFloat).to(at::kBFloat16)));
}

// (2^24 + 1) + 1 = 2^24 in FP32, but 2^24 + (1 + 1) is not: the order of ranks shows, and it is the
// same for every element and size, on every rank.
TEST(Comm, SumsInTheOrderOfRanks) {
  if (device().is_cuda()) GTEST_SKIP() << "NCCL chooses its order";
  const Comm all = groups()[0];
  const float mine = all.rank() == 0 ? 0x1p24F : 1.0F;
  for (const int64_t size: {1, 1000, 100'000}) {
    Tensor x = full({size}, mine, at::kFloat);
    const Tensor in = x.repeat(all.size());
    Tensor part = zeros({size}, at::kFloat);
    all.all_reduce(x);
    all.reduce_scatter_async(part, in).wait();
    EXPECT_TRUE(at::equal(x, full({size}, 0x1p24, at::kFloat)));
    EXPECT_TRUE(at::equal(part, x));
  }
}

TEST(Comm, AllGather) {
  for (const Comm& comm: groups()) {
    for (const auto dtype: kTypes) {
      const Tensor in = rows_of(comm.rank(), 2, dtype);
      std::vector<Tensor> parts;
      for (int64_t i = 0; i < comm.size(); ++i) parts.push_back(rows_of(i, 2, dtype));
      Tensor out = zeros({2 * comm.size(), 3}, dtype);
      comm.all_gather_async(out, in).wait();
      EXPECT_TRUE(at::equal(out, at::cat(parts))) << comm.name() << ' ' << dtype;

      Tensor in_place = zeros({2 * comm.size(), 3}, dtype);
      const Tensor mine = in_place.narrow(0, 2 * comm.rank(), 2);
      mine.copy_(in);
      comm.all_gather_async(in_place, mine).wait();
      EXPECT_TRUE(at::equal(in_place, out));
    }
  }
}

TEST(Comm, ReduceScatter) {
  for (const Comm& comm: groups()) {
    const int64_t n = comm.size();
    for (const auto dtype: {at::kFloat, at::kDouble, at::kBFloat16}) {
      const Tensor in = rows_of(comm.rank(), 2 * n, dtype);
      Tensor expected = zeros({2 * n, 3}, at::kDouble);
      for (int64_t i = 0; i < n; ++i) expected += rows_of(i, 2 * n, at::kDouble);
      Tensor out = zeros({2, 3}, dtype);
      comm.reduce_scatter_async(out, in).wait();
      EXPECT_TRUE(at::equal(out, expected.narrow(0, 2 * comm.rank(), 2).to(dtype)));
    }
  }
}

// Member i sends (i + 2 j) % 3 rows to member j: zero, one or two.
TEST(Comm, AllToAllWithZeroRows) {
  for (const Comm& comm: groups()) {
    const auto rows = [](int64_t from, int64_t to) { return (from + 2 * to) % 3; };
    for (const auto dtype: kTypes) {
      std::vector<int64_t> send, recv;
      std::vector<Tensor> out_parts, in_parts;
      for (int64_t i = 0; i < comm.size(); ++i) {
        send.push_back(rows(comm.rank(), i));
        recv.push_back(rows(i, comm.rank()));
        in_parts.push_back(rows_of(comm.rank() + i, send.back(), dtype));
        out_parts.push_back(rows_of(comm.rank() + i, recv.back(), dtype));
      }
      const Tensor out = all_to_all(comm, at::cat(in_parts), recv, send);
      EXPECT_TRUE(at::equal(out, at::cat(out_parts))) << comm.name() << ' ' << dtype;
    }
    // Nobody sends anything; and all rows go to member 0.
    const std::vector<int64_t> none(static_cast<size_t>(comm.size()), 0);
    const Tensor empty = zeros({0, 3}, at::kFloat);
    EXPECT_EQ(all_to_all(comm, empty, none, none).size(0), 0);
    std::vector<int64_t> to_first = none, from_all = none;
    to_first[0] = 2;
    if (comm.rank() == 0) from_all.assign(from_all.size(), 2);
    const Tensor got = all_to_all(comm, rows_of(comm.rank(), 2, at::kFloat), from_all, to_first);
    EXPECT_EQ(got.size(0), comm.rank() == 0 ? 2 * comm.size() : 0);
  }
}

// Around a ring in both directions at once; in a pair one way only.
TEST(Comm, AllToAllWithNeighbours) {
  for (const Comm& comm: {groups()[0], groups()[1]}) {
    if (comm.size() == 1) continue;
    const int64_t n = comm.size(), next = (comm.rank() + 1) % n, last = (comm.rank() + n - 1) % n;
    const auto rows = [n](int64_t member, int64_t count) {
      std::vector<int64_t> splits(static_cast<size_t>(n), 0);
      splits[static_cast<size_t>(member)] = count;
      return splits;
    };
    Tensor from_last = zeros({4, 3}, at::kBFloat16), from_next = zeros({2, 3}, at::kFloat);
    Work up = comm.all_to_all_async(
      from_last, rows_of(comm.rank(), 4, at::kBFloat16), rows(last, 4), rows(next, 4));
    Work down = comm.all_to_all_async(
      from_next, rows_of(comm.rank(), 2, at::kFloat), rows(next, 2), rows(last, 2));
    down.wait();
    up.wait();
    EXPECT_TRUE(at::equal(from_last, rows_of(last, 4, at::kBFloat16)));
    EXPECT_TRUE(at::equal(from_next, rows_of(next, 2, at::kFloat)));
    if (n > 2) continue;
    const bool sends = comm.rank() == 0;
    const Tensor got = all_to_all(comm, rows_of(5, sends ? 3 : 0, at::kFloat),
      rows(1 - comm.rank(), sends ? 0 : 3), rows(1 - comm.rank(), sends ? 3 : 0));
    EXPECT_TRUE(at::equal(got, rows_of(5, sends ? 0 : 3, at::kFloat)));
  }
}

// Several operations of two groups under way at once, completed in another order than started.
TEST(Comm, OperationsOverlap) {
  const Comm all = groups()[0], parity = groups()[1];
  const int64_t n = all.size();
  Tensor gathered = zeros({n * 50'000}, at::kFloat), small = full({1}, 1.0, at::kFloat);
  Tensor part = zeros({10}, at::kFloat), other = full({5}, 2.0, at::kBFloat16);
  {
    Work gather =
      all.all_gather_async(gathered, full({50'000}, static_cast<double>(all.rank()), at::kFloat));
    Work sum = parity.all_reduce_async(small);
    Work scatter = all.reduce_scatter_async(part, full({n * 10}, 1.0, at::kFloat));
    Work unwaited = parity.all_reduce_async(other); // its destructor waits
    scatter.wait();
    sum.wait();
    gather.wait();
    gather.wait();
    sum = Work();
  }
  EXPECT_EQ(small.item<float>(), static_cast<float>(parity.size()));
  EXPECT_TRUE(at::equal(other, full({5}, 2.0 * static_cast<double>(parity.size()), at::kBFloat16)));
  EXPECT_TRUE(at::equal(part, full({10}, static_cast<double>(n), at::kFloat)));
  for (int64_t i = 0; i < n; ++i)
    EXPECT_TRUE(at::equal(
      gathered.narrow(0, i * 50'000, 50'000), full({50'000}, static_cast<double>(i), at::kFloat)));
}

// What the caller gave may be dropped while the operation is under way.
TEST(Comm, WorkKeepsTensorsAlive) {
  const Comm all = groups()[0];
  Tensor out = zeros({all.size() * 30'000}, at::kFloat);
  Work work;
  {
    const Tensor in = full({30'000}, 3.0, at::kFloat);
    work = all.all_gather_async(out, in);
  }
  const Tensor reused = full({30'000}, -1.0, at::kFloat);
  work.wait();
  EXPECT_TRUE(at::equal(out, full(out.sizes(), 3.0, at::kFloat)));
}

TEST(Comm, GathersStrings) {
  for (const Comm& comm: groups()) {
    for (int64_t round = 0; round < 3; ++round) {
      const auto word = [&](int64_t rank) {
        return std::string(static_cast<size_t>(rank), '\0') + fmt::format("{} {}", rank, round);
      };
      const auto all = comm.all_gather_strings(word(comm.rank()));
      ASSERT_EQ(std::ssize(all), comm.size());
      for (int64_t i = 0; i < comm.size(); ++i) EXPECT_EQ(all[static_cast<size_t>(i)], word(i));
    }
  }
}

TEST(Comm, BarrierWaitsForTheLast) {
  using Clock = std::chrono::steady_clock;
  const Comm all = groups()[0];
  all.barrier();
  const auto start = Clock::now();
  if (all.rank() == all.size() - 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
  all.barrier();
  EXPECT_GE(Clock::now() - start, std::chrono::milliseconds(250));
}

TEST(Comm, WrongSizesAreNamed) {
  const Comm all = groups()[0];
  Tensor out = zeros({all.size() + 1}, at::kFloat);
  const Tensor in = zeros({1}, at::kFloat);
  EXPECT_PRED2(contains, error_text([&] { all.all_gather_async(out, in).wait(); }),
    "the parts do not cut out: out: float32");
  const std::vector<int64_t> splits(static_cast<size_t>(all.size()), 2);
  EXPECT_PRED2(contains, error_text([&] { all_to_all(all, in, splits, splits); }),
    "the parts do not cut in: ");
}

TEST(Comm, DifferencesBetweenRanksAreNamed) {
  const Comm all = groups()[0];
  if (all.size() == 1) GTEST_SKIP();
  check_same_everywhere(all, {{"build", "a"}, {"configuration", "x = 1\ny = 2\n"}});
  const bool odd = all.rank() == all.size() - 1;
  const std::string text = error_text([&] {
    check_same_everywhere(
      all, {{"build", "a"}, {"configuration", odd ? "x = 1\ny = 3\n" : "x = 1\ny = 2\n"}});
  });
  EXPECT_PRED2(contains, text,
    fmt::format("configuration of rank 0 and of ranks [{}] differ; line 2: 'y = 2' and "
                "'y = 3'",
      all.size() - 1));
}

} // namespace
} // namespace pith::test
