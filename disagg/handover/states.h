// What becomes of an attempt whose KV changes hands: what P knows of it, and what D does. Each side
// is one table, state x event -> state and action; states.md prints both.
//
// A pair that is in no row cannot be, and ends in a CHECK. What a peer, another process, may say is therefore in the
// rows of every state that has a peer: where it means nothing the state stays, and nothing is done.
//
// Thread safety: constants, but for Visits.
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
  expected,          // the engine has it, or will; the peer has not heard of it
  asked,             // the engine computes it, or will; the peer was asked for room
  writing,           // … and has said where: KV goes while it is computed
  writing_short,     // … and a post has failed
  waiting,           // computed, and no room yet
  prefill_sending,   // delivered: until the last post is done
  offered,           // pull: the peer may read
  lent,              // blocks between processes: until the peer has taken them, or will not
  withdrawing,       // given up, and the engine still has it
  withdrawing_told,  // … and the peer, which knows of it, is to be told
  closing,           // over: until no post is under way, and no reader inside
  closing_told,      // … and the peer is to be told
  gone,
};

enum class SenderEvent : uint8_t {
  started,          // engine: the first step begins; with reservations: P has what it needs
  prompt_done,      // engine: its KV is all here
  ended,            // engine: nothing will leave
  reserved,         // D: KvReserved, a place for it all
  misplaced,        // D: KvReserved, a place that cannot be
  taken,            // D: KvTaken
  cancelled,        // D: ReservationCancelled
  peer_gone,        // and the conductor knows
  connection_lost,  // and it does not
  lends,            // the blocks stay this process's until they are taken
  no_registration,  // the wire opens none to read
  post_failed,      // wire
  quiet,            // wire: nothing is under way, and the window closed
  silent,           // tick: the peer, for a lease
  request_over,     // tick: the client has gone, or has no more time
  shut_down,
};

enum class SenderAction : uint8_t {
  nothing,
  ask,           // ReserveKv
  take_place,    // post what is computed
  deliver,       // KvDelivered
  offer,         // open a window, KvOffered
  fail,          // AttemptFailed, to the conductor
  end_or_fail,   // its choices end, where the request is over; else AttemptFailed
  end,           // its choices end
  cancel_posts,  // none of them is waited for any more
  tell,          // ReservationCancelled, to the peer
  free,          // its KV
  free_and_tell,
};

enum class ReceiverState : uint8_t {
  remote_prefilling,   // waits for room, and holds nothing
  loading,             // … and holds what a tier loads, or has loaded
  unclaimed,           // decode_first: has room, and waits for a P
  granted,             // a window is open, and P knows where to write
  finished_prefills,   // delivered: until so many posts have arrived
  closing,             // they have: until nobody can write there any more
  reading,             // pull: until the read is done
  finished_transfers,  // all is here
  incomplete,          // it will not come whole: D computes the prompt
  gone,                // given up, or in the engine
};

enum class ReceiverEvent : uint8_t {
  loads,            // room: a tier has some of it
  room_to_write,    // room: there is room, …
  room_to_read,     // … the same, pull
  room_to_claim,    // … the same, decode_first
  room_for_all,     // … the same, and nothing is to be computed elsewhere
  claimed,          // P: ReserveKv of an attempt that is D's own
  delivered,        // P: KvDelivered, all is posted
  delivered_short,  // P: the same, and a post has failed
  misdelivered,     // P: the same, and it does not fit the request
  cancelled,        // P: ReservationCancelled
  peer_gone,        // and the conductor knows
  connection_lost,  // and it does not
  no_registration,  // the wire opens none to write
  counted,          // wire: all posts have arrived
  closed,           // wire: the window is
  read_done,        // wire
  read_failed,      // wire
  silent,           // tick: P, for a lease
  late,             // tick: what is delivered is not worth the wait any more
  request_over,     // tick: the client has gone, or has no more time
  adopted,          // tick: its turn has come
  shut_down,
};

enum class ReceiverAction : uint8_t {
  nothing,
  promise,    // open a window, KvReserved
  read,       // post the read
  hand_out,   // PrefillJob, to the conductor
  accept,     // what KvDelivered says
  give_back,  // blocks that KvDelivered hands over, and nobody here wants
  drop,       // its room
  fail,       // AttemptFailed, and drop
  refuse,     // give back, and fail
  give_up,    // drop; decode_first: and AttemptFailed
  expire,     // counted, and fail
  end,        // its client's choices, tell P, and drop
  adopt,      // its sequences go to the engine, with the KV
  recompute,  // … without
};

// An enumerator's name, from how the compiler spells it: "… [with auto value = …::SenderState::asked; …".
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

// Some of an enum's values.
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
    std::optional<State> next;  // kStays: the same
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
          if (steps[s][e].can_be) throw "a pair in two rows";  // of a constant: does not compile
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
  constexpr Any<SenderState> kComputed = {waiting, offered};  // its choices are here
  constexpr Any<SenderState> kDelivered = {prefill_sending, lent};
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
      {kDelivered | kWithdrawing | kClosing, E::reserved, kStays, A::nothing},
      {asked, E::misplaced, withdrawing_told, A::fail},
      {waiting, E::misplaced, closing_told, A::end_or_fail},
      {{offered, lent, closing_told}, E::taken, closing, A::nothing},
      {kComputing | kWithdrawing | Any{waiting, prefill_sending, closing}, E::taken, kStays, A::nothing},
      {kComputing, {E::cancelled, E::connection_lost}, withdrawing, A::fail},
      {kComputed, {E::cancelled, E::connection_lost}, closing, A::end_or_fail},
      {kComputing, E::peer_gone, withdrawing, A::nothing},
      {kComputed, E::peer_gone, closing, A::nothing},
      {kWithdrawing, {E::cancelled, E::connection_lost, E::peer_gone}, withdrawing, A::nothing},
      {kDelivered | kClosing, {E::cancelled, E::connection_lost, E::peer_gone}, closing, A::nothing},

      {prefill_sending, E::lends, lent, A::nothing},
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
      {lent, E::silent, closing, A::nothing},
      {kComputed, E::request_over, closing_told, A::end},
      {kComputing | kWithdrawing, E::shut_down, withdrawing, A::nothing},
      {kComputed | kDelivered | kClosing, E::shut_down, closing, A::nothing},
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
      {kWaiting, E::room_to_write, granted, A::promise},
      {kWaiting, E::room_to_read, reading, A::read},
      {kWaiting, E::room_to_claim, unclaimed, A::hand_out},
      {kWaiting, E::room_for_all, finished_transfers, A::nothing},

      {unclaimed, E::claimed, granted, A::promise},
      {kWaiting | kDelivered | Any{granted, reading}, E::claimed, kStays, A::nothing},
      {granted, E::delivered, finished_prefills, A::accept},
      {granted, E::delivered_short, incomplete, A::accept},
      {granted, E::misdelivered, gone, A::refuse},
      {kWaiting | kDelivered | reading, E::delivered, kStays, A::give_back},
      {kWaiting | granted, E::cancelled, gone, A::give_up},
      {kWaiting | Any{granted, reading}, E::peer_gone, gone, A::drop},
      {kWaiting | Any{granted, reading}, E::connection_lost, gone, A::fail},
      {finished_prefills, {E::cancelled, E::peer_gone, E::connection_lost}, incomplete, A::nothing},
      {{closing, incomplete}, {E::cancelled, E::peer_gone, E::connection_lost}, kStays, A::nothing},
      {reading, E::cancelled, kStays, A::nothing},

      {granted, E::no_registration, gone, A::fail},
      {finished_prefills, E::counted, closing, A::nothing},
      {closing, E::closed, finished_transfers, A::nothing},
      {reading, E::read_done, finished_transfers, A::nothing},
      {reading, E::read_failed, incomplete, A::nothing},

      {kWaiting | Any{granted, reading}, E::silent, gone, A::expire},
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

// Which pairs a test has seen.
struct Visits {
  SenderMachine::Visits sender = {};
  ReceiverMachine::Visits receiver = {};
};

}  // namespace xpyd::disagg::handover
