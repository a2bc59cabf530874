#include "disagg/handover/states.h"

namespace xpyd::disagg::handover {
namespace {

constexpr SenderMachine make_sender() {
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
      {offered, E::no_window, closing, A::end_or_fail},
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

constexpr ReceiverMachine make_receiver() {
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

      {granted, E::no_window, gone, A::fail},
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

constexpr SenderMachine kSender = make_sender();
constexpr ReceiverMachine kReceiver = make_receiver();

}  // namespace

const SenderMachine& sender_machine() { return kSender; }
const ReceiverMachine& receiver_machine() { return kReceiver; }

}  // namespace xpyd::disagg::handover
