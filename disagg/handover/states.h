// The two state tables of an attempt whose KV changes hands: the sender's at P and the receiver's at D. Each maps a
// state and an event to the next state and an action.
//
// A pair that is in no row cannot happen and ends in a CHECK. An event that a message of a peer causes therefore has a
// row for every state that has a peer. Where such a message means nothing, the state stays and nothing is done.
//
// Thread safety: constants, except Visits.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "base/status.h"

namespace xpyd::disagg::handover {

enum class SenderState : uint8_t {
  expected,          // the engine has or gets it; the peer does not know it
  asked,             // the engine computes or gets it; the peer was asked for room
  writing,           // … and has granted room: KV leaves while it is computed
  writing_short,     // … and a transfer has failed
  waiting,           // computed; room is not granted yet
  prefill_sending,   // delivered; a transfer may still be in flight
  offered,           // pull: the peer may read
  withdrawing,       // given up; the engine still has it
  withdrawing_told,  // … and the peer must still be told
  closing,           // over; a transfer may be in flight, or a reader inside
  closing_told,      // … and the peer must still be told
  gone,
};

enum class SenderEvent : uint8_t {
  started,          // engine: the first step begins; with reservations: P's part is held
  prompt_done,      // engine: all of its KV is here
  ended,            // engine: it ended here, nothing will leave
  reserved,         // D: KvReserved
  taken,            // D: KvTaken
  cancelled,        // D: ReservationCancelled
  peer_gone,        // the conductor knows
  no_registration,  // transport: a registration to read is refused
  post_failed,      // transport
  quiet,            // transport: nothing is in flight and the registration is closed
  silent,           // tick: the peer was silent for a lease
  request_over,     // tick: the request is cancelled or late
  shut_down,
};

enum class SenderAction : uint8_t {
  nothing,
  ask,           // sends ReserveKv
  take_place,    // sends the KV computed so far
  deliver,       // sends KvDelivered
  offer,         // opens a registration, sends KvOffered
  fail,          // sends AttemptFailed to the conductor
  end_or_fail,   // ends its choices if the request is over, else sends AttemptFailed
  end,           // ends its choices
  cancel_posts,  // cancels its transfers
  tell,          // sends ReservationCancelled to the peer
  free,          // frees its KV
  free_and_tell,
};

enum class ReceiverState : uint8_t {
  remote_prefilling,   // waits for room, and holds nothing
  loading,             // … and holds what an offload tier loads or has loaded
  unclaimed,           // decode_first: has room, and waits for a P
  granted,             // a registration is open, and P knows where to write
  finished_prefills,   // delivered; some transfers may not have arrived
  closing,             // all have arrived; a writer may still be inside
  reading,             // pull: the read is in flight
  finished_transfers,  // all KV is here
  incomplete,          // the KV will not be complete: D computes the prompt
  gone,                // given up, or in the engine
};

enum class ReceiverEvent : uint8_t {
  loads,            // KvRoom: an offload tier holds part of it
  room_to_write,    // KvRoom: there is room (push)
  room_to_read,     // … the same, pull
  room_to_claim,    // … the same, decode_first
  room_for_all,     // … the same, and all KV is already here
  claimed,          // P: ReserveKv for an attempt that D holds already
  delivered,        // P: KvDelivered, all transfers have started
  delivered_short,  // P: the same, and a transfer has failed
  cancelled,        // P: ReservationCancelled
  peer_gone,        // the conductor knows
  no_registration,  // transport: a registration to write is refused
  counted,          // transport: all transfers have arrived
  closed,           // transport: the registration is closed
  read_done,        // transport
  read_failed,      // transport
  silent,           // tick: P was silent for a lease
  late,             // tick: the KV is not worth the wait any more
  request_over,     // tick: the request is cancelled or late
  adopted,          // tick: it can go to the engine now
  shut_down,
};

enum class ReceiverAction : uint8_t {
  nothing,
  announce,   // opens a registration, sends KvReserved
  read,       // starts the read
  hand_out,   // sends PrefillJob to the conductor
  accept,     // takes the contents of KvDelivered
  give_back,  // gives back the blocks of an unwanted KvDelivered
  drop,       // gives up its room
  fail,       // sends AttemptFailed, then drop
  give_up,    // drop; decode_first: also AttemptFailed
  end,        // ends its choices, tells P, then drop
  adopt,      // gives its sequences to the engine, with the KV
  recompute,  // … without
};

// Returns an enumerator's name, from how the compiler spells it: "… [with auto value = …::SenderState::asked; …".
template <auto value>
constexpr std::string_view name_of() {
  const std::string_view text = __PRETTY_FUNCTION__;
  const std::string_view full = text.substr(0, text.find_first_of(";]", text.find("value = ")));
  return full.substr(full.rfind(':') + 1);
}
template <class Enum>
requires std::is_enum_v<Enum> std::string_view name(Enum e) {
  static constexpr auto kNames = []<size_t... i>(std::index_sequence<i...>) {
    return std::array{name_of<Enum(i)>()...};
  }
  (std::make_index_sequence<32>());
  return kNames[size_t(e)];
}

// A set of values of an enum.
template <class Enum>
struct Any {
  uint32_t bits = 0;
  constexpr Any(Enum one) : bits(1u << int(one)) {}
  constexpr Any(std::initializer_list<Enum> some) {
    for (Enum e : some) bits |= 1u << int(e);
  }
  constexpr bool has(Enum e) const { return (bits >> int(e) & 1) != 0; }
  friend constexpr Any operator|(Any a, Any b) {
    a.bits |= b.bits;
    return a;
  }
};

inline constexpr std::nullopt_t kStays = std::nullopt;

template <class State, class Event, class Action>
struct Machine {
  static constexpr size_t kStates = size_t(State::gone), kEvents = size_t(Event::shut_down) + 1;
  struct Rule {
    Any<State> in;
    Any<Event> when;
    std::optional<State> next;  // kStays: unchanged
    Action action;
  };
  struct Step {
    State next = State::gone;
    Action action = Action::nothing;
    bool can_be = false;
  };
  using Visits = std::array<std::array<int, kEvents>, kStates>;

  std::array<std::array<Step, kEvents>, kStates> steps = {};

  template <size_t n>
  explicit constexpr Machine(const Rule (&rules)[n]) {
    for (const Rule& rule : rules)
      for (size_t s = 0; s < kStates; ++s)
        for (size_t e = 0; e < kEvents; ++e) {
          if (!rule.in.has(State(s)) || !rule.when.has(Event(e))) continue;
          if (steps[s][e].can_be) throw "a pair in two rows";  // in a constant expression, so it does not compile
          steps[s][e] = {rule.next.value_or(State(s)), rule.action, true};
        }
  }
  const Step& step(State state, Event event, Visits* visits) const {
    XPYD_CHECK(state != State::gone);
    const Step& step = steps[size_t(state)][size_t(event)];
    XPYD_CHECK(step.can_be, std::string(name(event)) + " in " + std::string(name(state)));
    if (visits) ++(*visits)[size_t(state)][size_t(event)];
    return step;
  }
};

using SenderMachine = Machine<SenderState, SenderEvent, SenderAction>;
using ReceiverMachine = Machine<ReceiverState, ReceiverEvent, ReceiverAction>;

constexpr SenderMachine sender_table() {
  using enum SenderState;
  using E = SenderEvent;
  using A = SenderAction;
  constexpr Any<SenderState> kComputing = {expected, asked, writing, writing_short};
  constexpr Any<SenderState> kComputed = {waiting, offered};  // P holds its choices
  constexpr Any<SenderState> kWithdrawing = {withdrawing, withdrawing_told}, kClosing = {closing, closing_told};
  constexpr SenderMachine::Rule kRules[] = {
      {expected, E::started, asked, A::ask},
      {withdrawing, E::started, kStays, A::nothing},
      {expected, E::prompt_done, offered, A::offer},
      {asked, E::prompt_done, waiting, A::nothing},
      {writing, E::prompt_done, prefill_sending, A::deliver},
      {writing_short, E::prompt_done, closing, A::deliver},
      {withdrawing, E::prompt_done, closing, A::nothing},
      {withdrawing_told, E::prompt_done, closing_told, A::nothing},
      {{expected, withdrawing}, E::ended, closing, A::nothing},
      {{asked, writing, writing_short, withdrawing_told}, E::ended, closing_told, A::nothing},

      {{asked, waiting}, E::reserved, writing, A::take_place},
      {{expected, writing, writing_short, offered}, E::reserved, kStays, A::nothing},
      {kWithdrawing | kClosing | prefill_sending, E::reserved, kStays, A::nothing},
      {{offered, closing_told}, E::taken, closing, A::nothing},
      {kComputing | kWithdrawing | Any{waiting, prefill_sending, closing}, E::taken, kStays, A::nothing},
      {kComputing, E::cancelled, withdrawing, A::fail},
      {kComputed, E::cancelled, closing, A::end_or_fail},
      {kComputing, E::peer_gone, withdrawing, A::nothing},
      {kComputed, E::peer_gone, closing, A::nothing},
      {kWithdrawing, {E::cancelled, E::peer_gone}, withdrawing, A::nothing},
      {kClosing | prefill_sending, {E::cancelled, E::peer_gone}, closing, A::nothing},

      {offered, E::no_registration, closing, A::end_or_fail},
      {{writing, writing_short}, E::post_failed, writing_short, A::nothing},
      {prefill_sending, E::post_failed, closing, A::tell},
      {kWithdrawing | kClosing, E::post_failed, kStays, A::nothing},
      {{prefill_sending, closing}, E::quiet, gone, A::free},
      {closing_told, E::quiet, gone, A::free_and_tell},
      {withdrawing_told, E::quiet, withdrawing, A::tell},

      {{asked, writing, writing_short}, E::silent, withdrawing_told, A::fail},
      {kComputed, E::silent, closing_told, A::end_or_fail},
      {prefill_sending, E::silent, kStays, A::cancel_posts},
      {kComputed, E::request_over, closing_told, A::end},
      {kComputing | kWithdrawing, E::shut_down, withdrawing, A::nothing},
      {kComputed | kClosing | prefill_sending, E::shut_down, closing, A::nothing},
  };
  return SenderMachine(kRules);
}

constexpr ReceiverMachine receiver_table() {
  using enum ReceiverState;
  using E = ReceiverEvent;
  using A = ReceiverAction;
  constexpr Any<ReceiverState> kWaiting = {remote_prefilling, loading};
  constexpr Any<ReceiverState> kDelivered = {finished_prefills, closing, incomplete};
  constexpr ReceiverMachine::Rule kRules[] = {
      {remote_prefilling, E::loads, loading, A::nothing},
      {kWaiting, E::room_to_write, granted, A::announce},
      {kWaiting, E::room_to_read, reading, A::read},
      {kWaiting, E::room_to_claim, unclaimed, A::hand_out},
      {kWaiting, E::room_for_all, finished_transfers, A::nothing},

      {unclaimed, E::claimed, granted, A::announce},
      {kWaiting | kDelivered | Any{granted, reading}, E::claimed, kStays, A::nothing},
      {granted, E::delivered, finished_prefills, A::accept},
      {granted, E::delivered_short, incomplete, A::accept},
      {kWaiting | kDelivered | reading, E::delivered, kStays, A::give_back},
      {kWaiting | granted, E::cancelled, gone, A::give_up},
      {kWaiting | Any{granted, reading}, E::peer_gone, gone, A::drop},
      {finished_prefills, {E::cancelled, E::peer_gone}, incomplete, A::nothing},
      {{closing, incomplete}, {E::cancelled, E::peer_gone}, kStays, A::nothing},
      {reading, E::cancelled, kStays, A::nothing},

      {granted, E::no_registration, gone, A::fail},
      {finished_prefills, E::counted, closing, A::nothing},
      {closing, E::closed, finished_transfers, A::nothing},
      {reading, E::read_done, finished_transfers, A::nothing},
      {reading, E::read_failed, incomplete, A::nothing},

      {kWaiting | Any{granted, reading}, E::silent, gone, A::fail},
      {{finished_prefills, closing}, E::late, incomplete, A::nothing},
      {kWaiting | Any{unclaimed, granted}, E::request_over, gone, A::end},
      {finished_transfers, E::adopted, gone, A::adopt},
      {incomplete, E::adopted, gone, A::recompute},
      {kWaiting | kDelivered | Any{unclaimed, granted, reading}, E::shut_down, gone, A::drop},
  };
  return ReceiverMachine(kRules);
}

inline constexpr SenderMachine kSenderTable = sender_table();
inline constexpr ReceiverMachine kReceiverTable = receiver_table();

// Counts the pairs that a test has visited.
struct Visits {
  SenderMachine::Visits sender = {};
  ReceiverMachine::Visits receiver = {};
};

}  // namespace xpyd::disagg::handover
