// The specification in disagg/transport/transport.h, checked over every transport: between two ends in this process,
// and, where the transport leaves the process, with either end in another one.

#include <sched.h>
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>

#include "base/random.h"
#include "disagg/transport/registration_table.h"
#include "tests/catch.h"
#include "tests/disagg/transport_side.h"

#if defined(__SANITIZE_THREAD__)
extern "C" void AnnotateIgnoreReadsBegin(const char* file, int line);
extern "C" void AnnotateIgnoreReadsEnd(const char* file, int line);
#endif

namespace xpyd::testing::transport_test {

constexpr PeerId kPoster = 1, kOwner = 2, kThird = 3;
constexpr size_t KiB = 1024, MiB = 1024 * KiB;

enum class Mode { here, poster_there, owner_there };
const char* const kModes[] = {"both in this process", "the poster in another process", "the owner in another process"};

// A sender and the owner of memory, connected.
struct Pair {
  Pair(const TestedTransport& transport_, Mode mode_) : transport(transport_), mode(mode_) {
    poster = mode == Mode::poster_there ? make_side_there(transport, kPoster) : make_side_here(transport, kPoster);
    owner = mode == Mode::owner_there ? make_side_there(transport, kOwner) : make_side_here(transport, kOwner);
    REQUIRE(poster->connect(kOwner, owner->address()) == "");
    REQUIRE(owner->connect(kPoster, poster->address()) == "");
  }
  // A transfer that is given up may have ended the connection. An instance then connects again.
  void connect_again() { REQUIRE(poster->connect(kOwner, owner->address()) == ""); }
  TransferId post(KvOp op, const RemoteKey& key, const std::vector<Piece>& pieces, double deadline_s = 0) {
    return poster->post({kOwner, op, key, deadline_s}, pieces);
  }
  TransferState move(KvOp op, const RemoteKey& key, const std::vector<Piece>& pieces) {
    return settle(*poster, post(op, key, pieces));
  }
  // A third side, not connected.
  std::unique_ptr<Side> third() const {
    return transport.shares_process ? make_side_here(transport, kThird) : make_side_there(transport, kThird);
  }
  const TestedTransport& transport;
  const Mode mode;
  std::unique_ptr<Side> poster, owner;
};

// Runs a test over every transport that works here, in each of its modes.
void everywhere(const std::function<void(Pair&)>& test,
                std::vector<Mode> modes = {Mode::here, Mode::poster_there, Mode::owner_there}) {
  const char* only = std::getenv("XPYD_WIRE");
  for (const TestedTransport& transport : tested_transports()) {
    if (only && !transport.name.starts_with(only)) continue;
    if (transport.missing && !transport.missing().empty()) {
      mark_skipped(transport.missing());
      continue;
    }
    for (Mode mode : modes) {
      if (mode == Mode::here ? !transport.shares_process : !transport.leaves_process) continue;
      INFO(transport.name << ", " << kModes[int(mode)]);
      Pair pair(transport, mode);
      test(pair);
    }
  }
}

// Returns at most `n` pieces of random sizes up to `most` bytes, which do not overlap, in a random order.
std::vector<Piece> scattered(Random& random, int n, size_t most) {
  std::vector<Piece> pieces;
  size_t local = random.below(64), remote = random.below(64);
  for (int i = 0; i < n; ++i) {
    const size_t bytes = 1 + random.below(most);
    if (std::max(local, remote) + bytes + 64 > kRegionBytes[0]) break;
    pieces.push_back({local, remote, bytes});
    local += bytes + random.below(64), remote += bytes + random.below(64);
  }
  for (size_t i = pieces.size(); i > 1; --i) std::swap(pieces[i - 1], pieces[random.below(i)]);
  return pieces;
}

std::vector<Extent> remote_extents(const std::vector<Piece>& pieces) {
  std::vector<Extent> extents;
  for (const Piece& piece : pieces) extents.push_back({piece.remote, piece.bytes});
  return extents;
}

// The sender holds seed 1, and the owner seed 2. Returns how many bytes differ from what a write (or read) of `pieces`
// leaves. Outside the pieces nothing may change.
size_t wrong_after(Pair& pair, KvOp op, std::vector<Piece> pieces) {
  const bool write = op == KvOp::write;
  Side& changed = write ? *pair.owner : *pair.poster;
  const uint64_t old = write ? 2 : 1, now = write ? 1 : 2;
  auto to = [&](const Piece& p) { return write ? p.remote : p.local; };
  auto from = [&](const Piece& p) { return write ? p.local : p.remote; };
  std::sort(pieces.begin(), pieces.end(), [&](const Piece& a, const Piece& b) { return to(a) < to(b); });
  size_t wrong = 0, at = 0;
  for (const Piece& piece : pieces) {
    wrong += changed.differing(at, to(piece) - at, old, at);
    wrong += changed.differing(to(piece), piece.bytes, now, from(piece));
    at = to(piece) + piece.bytes;
  }
  return wrong + changed.differing(at, kSideBytes - at, old, at);
}

void fill_both(Pair& pair) {
  pair.poster->fill(0, kSideBytes, 1);
  pair.owner->fill(0, kSideBytes, 2);
}

TEST_CASE("transports: writes and reads place every byte and no other", "[transport]") {
  everywhere([](Pair& pair) {
    Random random(5);
    for (KvOp op : {KvOp::write, KvOp::read}) {
      for (auto [n, most] : {std::pair<int, size_t>{1, 1}, {3, 200}, {1000, 300}, {40, 300 * KiB}, {2, 8 * MiB}}) {
        fill_both(pair);
        const std::vector<Piece> pieces = scattered(random, n, most);
        const RemoteKey key = pair.owner->open(kPoster, op, remote_extents(pieces));
        REQUIRE(key.generation != 0);
        CHECK(pair.owner->arrived(key) == 0);
        REQUIRE(pair.move(op, key, pieces) == TransferState::done);
        CHECK(pair.owner->arrived(key) == 1);
        CHECK(wrong_after(pair, op, pieces) == 0);
        close_for_good(*pair.owner, key);
      }
    }
    // From the first region to the second, the other way round, and nothing at all.
    fill_both(pair);
    const RemoteKey key = pair.owner->open(kPoster, KvOp::write, {{0, kSideBytes}});
    for (const std::vector<Piece>& nothing : {std::vector<Piece>{}, {{5, 9, 0}}})
      CHECK(pair.move(KvOp::write, key, nothing) == TransferState::done);
    CHECK(pair.owner->arrived(key) == 2);
    CHECK(pair.owner->differing(0, kSideBytes, 2) == 0);
    const std::vector<Piece> across = {{100, kRegionBytes[0] + 50, 5000}, {kRegionBytes[0] + 7, 31, 6000}};
    REQUIRE(pair.move(KvOp::write, key, across) == TransferState::done);
    CHECK(wrong_after(pair, KvOp::write, across) == 0);
  });
}

TEST_CASE("transports: many transfers in flight are done, polled in any order", "[transport]") {
  everywhere([](Pair& pair) {
    fill_both(pair);
    Random random(8);
    struct Posted {
      TransferId id;
      RemoteKey key;
    };
    std::vector<Posted> posted;
    std::vector<Piece> all;
    size_t at = 0;
    for (int i = 0; i < 100; ++i) {
      std::vector<Piece> pieces;
      for (int p = 0; p < 3; ++p, at += 50 * KiB)
        pieces.push_back({at + random.below(100), at + random.below(100), 1 + random.below(49 * KiB)});
      const RemoteKey key = pair.owner->open(kPoster, KvOp::write, remote_extents(pieces));
      for (const Posted& other : posted) REQUIRE(!(other.key == key));
      posted.push_back({pair.post(KvOp::write, key, pieces), key});
      all.insert(all.end(), pieces.begin(), pieces.end());
    }
    for (size_t i = posted.size(); i > 1; --i) std::swap(posted[i - 1], posted[random.below(i)]);
    for (const Posted& p : posted) {
      REQUIRE(settle(*pair.poster, p.id) == TransferState::done);
      CHECK(pair.owner->arrived(p.key) == 1);
    }
    CHECK(wrong_after(pair, KvOp::write, all) == 0);
    for (const Posted& p : posted) close_for_good(*pair.owner, p.key);
    // One registration counts all its transfers.
    const RemoteKey key = pair.owner->open(kPoster, KvOp::write, {{0, MiB}});
    std::vector<TransferId> ids;
    for (size_t i = 0; i < 64; ++i) ids.push_back(pair.post(KvOp::write, key, {{i * KiB, i * 16 * KiB, 16 * KiB}}));
    for (TransferId id : ids) CHECK(settle(*pair.poster, id) == TransferState::done);
    CHECK(pair.owner->arrived(key) == 64);
    close_for_good(*pair.owner, key);
    CHECK(pair.owner->arrived(key) == 0);
  });
}

TEST_CASE("transports: a transfer that no open registration allows is refused", "[transport]") {
  everywhere([](Pair& pair) {
    fill_both(pair);
    const std::vector<Piece> piece = {{0, 4096, 8192}};
    const auto refused = [&](KvOp op, const RemoteKey& key, const std::vector<Piece>& pieces) {
      return pair.move(op, key, pieces) == TransferState::failed;
    };
    const RemoteKey key = pair.owner->open(kPoster, KvOp::write, {{4096, 8192}});
    CHECK(refused(KvOp::read, key, piece));  // the other operation
    if (pair.transport.asks_ranges) {
      CHECK(refused(KvOp::write, key, {{0, 4095, 8192}}));  // one byte before, and one behind
      CHECK(refused(KvOp::write, key, {{0, 4096, 8193}}));
      CHECK(refused(KvOp::write, key, {{0, kRegionBytes[0] + 4096, 16}}));
      CHECK(refused(KvOp::write, key, {{0, 4096, 8}, {8, 3 * MiB, 8}}));  // the second piece is outside
    }
    CHECK(pair.owner->differing(4104, kSideBytes - 4104, 2, 4104) == 0);
    pair.owner->fill(4096, 8, 2, 4096);  // a transport may have moved the first piece
    // No transport writes outside the memory altogether.
    CHECK(pair.move(KvOp::write, key, {{0, kSideBytes + (size_t(1) << 40), 16}}) == TransferState::failed);
    for (RemoteKey no :
         {RemoteKey{}, RemoteKey{key.index, key.generation + 1, key.secret},
          RemoteKey{key.index + 1, key.generation, key.secret}, RemoteKey{UINT32_MAX, UINT32_MAX, UINT64_MAX}})
      CHECK(refused(KvOp::write, no, piece));
    CHECK(pair.owner->arrived(key) == 0);
    CHECK(pair.owner->differing(0, kSideBytes, 2) == 0);
    CHECK(pair.poster->differing(0, kSideBytes, 1) == 0);
    CHECK(pair.move(KvOp::write, key, piece) == TransferState::done);

    // A registration that is opened again in the same place has another generation.
    close_for_good(*pair.owner, key);
    CHECK(pair.owner->close(key));
    pair.owner->fill(0, kSideBytes, 2);
    CHECK(refused(KvOp::write, key, piece));
    for (int i = 0; i < 5; ++i) {
      // The refusal may have ended the connection, on which no registration depends.
      const RemoteKey next = pair.owner->open(kPoster, KvOp::write, {{4096, 8192}});
      CHECK(!(next == key));
      pair.connect_again();
      CHECK(refused(KvOp::write, key, piece));
      CHECK(pair.owner->arrived(next) == 0);
      CHECK(pair.owner->differing(0, kSideBytes, 2) == 0);
      pair.connect_again();
      CHECK(pair.move(KvOp::write, next, piece) == TransferState::done);
      CHECK(pair.owner->arrived(next) == 1);
      close_for_good(*pair.owner, next);
      pair.owner->fill(0, kSideBytes, 2);
    }
    CHECK(pair.owner->differing(0, kSideBytes, 2) == 0);
  });
}

TEST_CASE("transports: a registration belongs to one peer", "[transport]") {
  everywhere([](Pair& pair) {
    pair.poster->fill(0, 2 * MiB, 1);
    pair.owner->fill(0, 2 * MiB, 2);
    auto third = pair.third();
    REQUIRE(third->connect(kOwner, pair.owner->address()) == "");
    REQUIRE(pair.owner->connect(kThird, third->address()) == "");
    const RemoteKey key = pair.owner->open(kPoster, KvOp::write, {{0, MiB}});
    const RemoteKey thirds = pair.owner->open(kThird, KvOp::write, {{MiB, MiB}});
    const Piece piece{0, 100, 5000};
    CHECK(settle(*third, third->post({kOwner, KvOp::write, key, 0}, {piece})) == TransferState::failed);
    CHECK(pair.move(KvOp::write, thirds, {{0, MiB, 16}}) == TransferState::failed);
    CHECK(pair.owner->differing(0, 2 * MiB, 2) == 0);
    third->fill(0, MiB, 3);
    CHECK(settle(*third, third->post({kOwner, KvOp::write, thirds, 0}, {{0, MiB, 5000}})) == TransferState::done);
    CHECK(pair.owner->differing(MiB, 5000, 3) == 0);
    // The third side goes, and the first goes on.
    third.reset();
    pair.owner->disconnect(kThird);
    close_for_good(*pair.owner, thirds);
    CHECK(pair.move(KvOp::write, key, {piece}) == TransferState::done);
    CHECK(pair.owner->differing(100, 5000, 1) == 0);
  });
}

TEST_CASE("transports: a late transfer fails, and a cancelled one is done and counted or fails", "[transport]") {
  everywhere([](Pair& pair) {
    fill_both(pair);
    const RemoteKey key = pair.owner->open(kPoster, KvOp::write, {{0, 9 * MiB}});
    const TransferId late = pair.post(KvOp::write, key, {{0, 0, MiB}}, RealClock().now() - 1);
    CHECK(settle(*pair.poster, late) == TransferState::failed);
    CHECK(pair.owner->arrived(key) == 0);
    CHECK(pair.move(KvOp::write, key, {}) == TransferState::done);
    const TransferId early = pair.post(KvOp::write, key, {{0, 0, MiB}}, RealClock().now() + 3600);
    CHECK(settle(*pair.poster, early) == TransferState::done);
    CHECK(pair.owner->differing(0, MiB, 1) == 0);
    // A transfer is cancelled at some point. It is done and counted, or it fails, and then its source may change.
    int arrived = 2;
    for (int round = 0; round < 12; ++round) {
      std::vector<TransferId> ids;
      for (int i = 0; i < 4; ++i) ids.push_back(pair.post(KvOp::write, key, {{MiB, MiB, 8 * MiB}}));
      for (TransferId id : ids) pair.poster->cancel(id);
      for (TransferId id : ids) arrived += settle(*pair.poster, id) == TransferState::done;
      CHECK(pair.owner->arrived(key) >= arrived);
      pair.poster->fill(MiB, 64 * KiB, 7);
      pair.poster->fill(MiB, 64 * KiB, 1, MiB);
    }
    CHECK(pair.owner->arrived(key) >= arrived);  // the notice of a failed one may have been on its way
    close_for_good(*pair.owner, key);
  });
}

TEST_CASE("transports: a cancelled read leaves the rows alone once it is settled", "[transport]") {
  everywhere([](Pair& pair) {
    fill_both(pair);
    const RemoteKey key = pair.owner->open(kPoster, KvOp::read, {{0, 16 * MiB}});
    for (int round = 0; round < 6; ++round) {
      const TransferId id = pair.post(KvOp::read, key, {{0, 0, 16 * MiB}});
      pair.poster->cancel(id);
      settle(*pair.poster, id);
      pair.poster->fill(0, 16 * MiB, 9);
      REQUIRE(pair.move(KvOp::read, key, {{17 * MiB, 100, 1000}}) == TransferState::done);
      CHECK(pair.poster->differing(0, 16 * MiB, 9) == 0);
      CHECK(pair.poster->differing(17 * MiB, 1000, 2, 100) == 0);
    }
    close_for_good(*pair.owner, key);
  });
}

TEST_CASE("transports: disconnect() fails transfers in flight and later ones", "[transport]") {
  for (const bool poster_leaves : {true, false})
    everywhere([&](Pair& pair) {
      const RemoteKey key = pair.owner->open(kPoster, KvOp::write, {{0, 16 * MiB}});
      std::vector<TransferId> ids;
      for (int i = 0; i < 8; ++i) ids.push_back(pair.post(KvOp::write, key, {{0, 0, 16 * MiB}}));
      poster_leaves ? pair.poster->disconnect(kOwner) : pair.owner->disconnect(kPoster);
      for (TransferId id : ids) settle(*pair.poster, id);
      if (!poster_leaves) close_for_good(*pair.owner, key);
      if (!poster_leaves) pair.owner->fill(0, kSideBytes, 2);
      CHECK(pair.move(KvOp::write, key, {{0, 0, MiB}}) == TransferState::failed);
      if (poster_leaves) return close_for_good(*pair.owner, key);
      CHECK(pair.owner->differing(0, kSideBytes, 2) == 0);
      CHECK_THROWS(pair.owner->open(kPoster, KvOp::write, {{0, 16}}));
    });
}

TEST_CASE("transports: addresses of other transports, and registrations for unknown peers, are errors with a reason",
          "[transport]") {
  everywhere(
      [](Pair& pair) {
        for (const char* address :
             {"", "nonsense", "local", "local:1:1", "tcp", "tcp,zz", "shm,0000", "tcp:127.0.0.1:99999:00",
              "shm:/nonexistent/socket:1", "rdma:mlx5_0:1:2:3", "local:99999999999999999999:1"}) {
          INFO(address);
          CHECK(pair.poster->connect(77, address) != "");
        }
        const RemoteKey key = pair.owner->open(kPoster, KvOp::write, {{0, 16}});
        CHECK(settle(*pair.poster, pair.poster->post({77, KvOp::write, key, 0}, {})) == TransferState::failed);
        CHECK(pair.move(KvOp::write, key, {{0, 0, 16}}) == TransferState::done);
        CHECK_THROWS(pair.owner->open(kThird, KvOp::write, {{0, 16}}));
        for (int i = 0; i < 3000; ++i)  // places of closed registrations are used again
          REQUIRE(pair.owner->close(pair.owner->open(kPoster, KvOp::write, {{0, 16}, {64, 64}})));
      },
      {Mode::here});
}

// Returns while a storm is writing somewhere behind `at`. These reads race on purpose.
void wait_for_a_write(Side& owner, size_t at) {
  owner.fill(at, 64, 9);
#if defined(__SANITIZE_THREAD__)
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
#endif
  while (owner.differing(at, 64, 9) == 0) sched_yield();
#if defined(__SANITIZE_THREAD__)
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
#endif
}

void stop(Side& side) {
  REQUIRE(kill(side.pid(), SIGSTOP) == 0);
  int status;
  REQUIRE(waitpid(side.pid(), &status, WUNTRACED) == side.pid());
}
void go_on(Side& side) { REQUIRE(kill(side.pid(), SIGCONT) == 0); }

TEST_CASE("transports: if either side is killed in the middle of a write, the other one goes on", "[transport]") {
  everywhere(
      [](Pair& pair) {
        const bool poster_dies = pair.mode == Mode::poster_there;
        const RemoteKey key = pair.owner->open(kPoster, KvOp::write, {{0, 16 * MiB}});
        std::vector<TransferId> ids;
        if (poster_dies) {
          pair.poster->fill(0, 16 * MiB, 1);
          pair.poster->storm({kOwner, KvOp::write, key, 0}, {{0, 0, 16 * MiB}});
          wait_until([&] { return pair.owner->arrived(key) >= 3; });
          wait_for_a_write(*pair.owner, 8 * MiB);
        } else {
          for (int i = 0; i < 8; ++i) ids.push_back(pair.post(KvOp::write, key, {{0, 0, 16 * MiB}}));
        }
        Side &dead = poster_dies ? *pair.poster : *pair.owner, &alive = poster_dies ? *pair.owner : *pair.poster;
        const PeerId gone = poster_dies ? kPoster : kOwner;
        REQUIRE(kill(dead.pid(), SIGKILL) == 0);
        siginfo_t info;
        REQUIRE(waitid(P_PID, id_t(dead.pid()), &info, WEXITED | WNOWAIT) == 0);
        for (TransferId id : ids) settle(alive, id);
        alive.disconnect(gone);
        if (poster_dies) close_for_good(alive, key);
        if (!poster_dies) CHECK(pair.move(KvOp::write, key, {{0, 0, 16}}) == TransferState::failed);
        // Another peer works as before.
        auto third = pair.third();
        REQUIRE(third->connect(poster_dies ? kOwner : kPoster, alive.address()) == "");
        REQUIRE(alive.connect(kThird, third->address()) == "");
        Side &from = poster_dies ? *third : alive, &to = poster_dies ? alive : *third;
        from.fill(0, MiB, 3);
        to.fill(0, kSideBytes, 2);
        const RemoteKey next = to.open(poster_dies ? kThird : kPoster, KvOp::write, {{0, MiB}});
        const KvTransfer transfer{poster_dies ? kOwner : kThird, KvOp::write, next, 0};
        CHECK(settle(from, from.post(transfer, {{0, 0, MiB}})) == TransferState::done);
        CHECK(to.differing(0, MiB, 3) == 0);
        CHECK(to.differing(MiB, kSideBytes - MiB, 2, MiB) == 0);
      },
      {Mode::poster_there, Mode::owner_there});
}

// With nccl both ends have enqueued their halves of a group, and one of them stands still.
// The kernel destroys what the owner had open. Soft-RoCE waits 50 s to destroy a queue pair that an older memory window
// is bound to.
TEST_CASE("transports: a killed owner with open registrations ends within 20 s", "[transport]") {
  everywhere(
      [](Pair& pair) {
        std::vector<RemoteKey> keys;
        for (int i = 0; i < 70; ++i) keys.push_back(pair.owner->open(kPoster, KvOp::write, {{size_t(i) * 64, 16}}));
        for (const RemoteKey& key : keys) close_for_good(*pair.owner, key);
        auto third = pair.third();
        REQUIRE(third->connect(kOwner, pair.owner->address()) == "");
        REQUIRE(pair.owner->connect(kThird, third->address()) == "");
        const RemoteKey key = pair.owner->open(kThird, KvOp::write, {{0, MiB}});
        CHECK(settle(*third, third->post({kOwner, KvOp::write, key, 0}, {{0, 0, MiB}})) == TransferState::done);
        const double before = RealClock().now();
        REQUIRE(kill(pair.owner->pid(), SIGKILL) == 0);
        siginfo_t info;
        REQUIRE(waitid(P_PID, id_t(pair.owner->pid()), &info, WEXITED | WNOWAIT) == 0);
        CHECK(RealClock().now() - before < 20);
      },
      {Mode::owner_there});
}

// With nccl both ends have enqueued their halves of a group, and one of them stands still.
TEST_CASE("transports: a stopped owner holds no transfer beyond its deadline, and none that is cancelled",
          "[transport]") {
  everywhere(
      [](Pair& pair) {
        const RemoteKey key = pair.owner->open(kPoster, KvOp::write, {{0, 16 * MiB}});
        std::vector<TransferId> given_up, late;
        for (int i = 0; i < 8; ++i) given_up.push_back(pair.post(KvOp::write, key, {{0, 0, 16 * MiB}}));
        REQUIRE(settle(*pair.poster, given_up[0]) == TransferState::done);
        given_up.erase(given_up.begin());
        stop(*pair.owner);
        for (TransferId id : given_up) pair.poster->cancel(id);
        for (TransferId id : given_up) settle(*pair.poster, id);
        for (int i = 0; i < 3; ++i)
          late.push_back(pair.post(KvOp::write, key, {{0, 0, 16 * MiB}}, RealClock().now() + 0.1));
        for (TransferId id : late) {
          const TransferState state = settle(*pair.poster, id);
          if (pair.transport.needs_owner) CHECK(state == TransferState::failed);
        }
        const TransferId early = pair.post(KvOp::write, key, {{0, 0, MiB}});
        pair.poster->cancel(early);
        const TransferState state = settle(*pair.poster, early);
        if (pair.transport.needs_owner) CHECK(state == TransferState::failed);
        go_on(*pair.owner);
        close_for_good(*pair.owner, key);
        pair.owner->fill(0, 16 * MiB, 2);
        const RemoteKey next = pair.owner->open(kPoster, KvOp::write, {{0, MiB}});
        pair.poster->fill(0, MiB, 6);
        pair.connect_again();
        CHECK(pair.move(KvOp::write, next, {{0, 0, MiB}}) == TransferState::done);
        CHECK(pair.owner->differing(0, MiB, 6) == 0);
        CHECK(pair.owner->differing(MiB, 15 * MiB, 2, MiB) == 0);
      },
      {Mode::owner_there});
}

// A sender is stopped while it writes, is given up, and goes on. Once close() has returned true, none of its bytes
// lands. Until then the memory is in quarantine.
TEST_CASE("transports: late writes of a zombie are refused", "[transport]") {
  everywhere(
      [](Pair& pair) {
        pair.poster->fill(0, 16 * MiB, 1);
        int quarantined = 0;
        for (int round = 0; round < 8; ++round) {
          const RemoteKey key = pair.owner->open(kPoster, KvOp::write, {{0, 16 * MiB}});
          pair.poster->storm({kOwner, KvOp::write, key, 0}, {{0, 0, 16 * MiB}});
          wait_until([&] { return pair.owner->arrived(key) >= 1 + round % 3; });
          wait_for_a_write(*pair.owner, size_t(1 + round) * MiB);
          stop(*pair.poster);
          bool closed = false;
          for (int i = 0; i < 1000 && !closed; ++i) closed = pair.owner->close(key);
          if (!closed) {
            ++quarantined;
            go_on(*pair.poster);
            close_for_good(*pair.owner, key);
          }
          pair.owner->fill(0, kSideBytes, 2);
          const RemoteKey next = pair.owner->open(kPoster, KvOp::write, {{17 * MiB, MiB}});
          if (closed) go_on(*pair.poster);
          CHECK(pair.poster->end_storm().failed >= 1);  // the last one began when the registration was closed
          CHECK(pair.owner->differing(0, kSideBytes, 2) == 0);
          CHECK(pair.owner->arrived(next) == 0);
          pair.connect_again();
          CHECK(pair.move(KvOp::write, next, {{0, 17 * MiB, 1000}}) == TransferState::done);
          close_for_good(*pair.owner, next);
        }
        INFO(quarantined << " of 8 were stopped with a piece on its way");
        SUCCEED();
      },
      {Mode::poster_there});
}

TEST_CASE("window table: random operations agree with a list", "[transport]") {
  std::vector<std::byte> memory(1 << 16);
  const MemoryRange region(memory);
  struct Known {
    RemoteKey key;
    PeerId peer;
    KvOp op;
    size_t begin, bytes;
    bool open = true;
    int inside = 0, arrived = 0;
  };
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Random random(seed);
    RegistrationTable table({&region, 1}, seed % 2);
    for (PeerId peer : {1, 2, 3}) table.connect(peer);
    std::vector<Known> known;
    for (int step = 0; step < 3000; ++step) {
      const uint64_t what = known.empty() ? 0 : random.below(6);
      Known* one = known.empty() ? nullptr : &known[random.below(known.size())];
      if (what == 0) {
        Known k{.peer = PeerId(1 + random.below(3)), .op = KvOp(random.below(2))};
        k.begin = random.below(60000), k.bytes = 1 + random.below(5000);
        const MemoryRange range = region.subspan(k.begin, k.bytes);
        k.key = table.open(k.peer, k.op, {&range, 1}).value();
        for (const Known& other : known) REQUIRE(!(other.key == k.key));
        known.push_back(k);
      } else if (what == 1) {
        one->open = false;
        REQUIRE(table.close(one->key) == (one->inside == 0));
      } else if (what <= 3) {
        const PeerId peer = random.below(4) ? one->peer : PeerId(1 + random.below(3));
        const KvOp op = random.below(4) ? one->op : KvOp(random.below(2));
        const size_t begin = random.below(4) ? one->begin + random.below(one->bytes) : random.below(60000);
        const size_t bytes = random.below(one->begin + one->bytes - std::min(begin, one->begin) + 2);
        const bool inside = bytes == 0 || (begin >= one->begin && begin + bytes <= one->begin + one->bytes);
        const bool may = one->open && peer == one->peer && op == one->op && inside;
        REQUIRE(table.enter(one->key, peer, op, memory.data() + begin, bytes) == may);
        one->inside += may;
      } else if (what == 4 && one->inside > 0) {
        const bool whole = random.below(2);
        --one->inside;
        REQUIRE(table.leave(one->key, whole) == one->open);
        one->arrived += one->open && whole;
      } else {
        REQUIRE(table.arrived(one->key) == (one->open || one->inside > 0 ? one->arrived : 0));
      }
    }
  }
}

TEST_CASE("window table: ranges that touch join, and nothing outside them is inside", "[transport]") {
  std::vector<std::byte> memory(100);
  const MemoryRange all(memory);
  const std::vector<MemoryRange> ranges = {all.subspan(10, 10), all.subspan(20, 5), all.subspan(40, 10),
                                           all.subspan(45, 10), all.subspan(70, 0)};
  const RangeSet set(ranges);
  for (size_t begin = 0; begin < 100; ++begin)
    for (size_t bytes = 0; begin + bytes <= 100; ++bytes) {
      const bool inside = bytes == 0 || (begin >= 10 && begin + bytes <= 25) || (begin >= 40 && begin + bytes <= 55);
      REQUIRE(set.contains(memory.data() + begin, bytes) == inside);
    }
  CHECK(!set.contains(memory.data() + 10, SIZE_MAX));
}

}  // namespace xpyd::testing::transport_test
