// Registry over etcd v3. It uses etcd's JSON gateway, so plain HTTP suffices. A process has one lease and renews it at
// a third of its time. Names are keys under that lease. Each name that is watched is asked for twice a second.
//
// After an outage the lease is checked. If etcd still has it, nothing happened. If it has expired (or etcd lost its
// data), a new lease is taken and every name is announced again.
//
// It is in this folder because it speaks HTTP. Folders below know only the interface.

#include <nettle/base64.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "base/json/json.h"
#include "server/http/http_client.h"
#include "server/workers/local_workers.h"

namespace xpyd::server {
namespace {

using nlohmann::json;

constexpr auto kTurn = std::chrono::milliseconds(500);

std::string to_base64(std::string_view bytes) {
  std::string out(BASE64_ENCODE_RAW_LENGTH(bytes.size()), '\0');
  base64_encode_raw(out.data(), bytes.size(), reinterpret_cast<const uint8_t*>(bytes.data()));
  return out;
}

// Returns "" if the text is not base64. etcd's own answers are.
std::string from_base64(std::string_view text) {
  base64_decode_ctx decoder;
  base64_decode_init(&decoder);
  std::string out(BASE64_DECODE_LENGTH(text.size()), '\0');
  size_t n = out.size();
  const bool good = base64_decode_update(&decoder, &n, reinterpret_cast<uint8_t*>(out.data()), text.size(),
                                         text.data());
  out.resize(good ? n : 0);
  return out;
}

// Reads a field of etcd's JSON, in which numbers are strings and zeros are omitted.
std::string word(const json& object, const char* name) {
  const json* field = object.is_object() ? find_field(object, name) : nullptr;
  return field && field->is_string() ? field->get<std::string>() : "";
}

class EtcdRegistry final : public Registry {
 public:
  EtcdRegistry(std::unique_ptr<HttpClient> http, std::string prefix, double ttl_s, Clock& clock)
      : http_(std::move(http)), prefix_(std::move(prefix)), ttl_s_(ttl_s), clock_(clock) {
    thread_ = std::thread([this] { run(); });
  }

  ~EtcdRegistry() override {
    change([this] { stopping_ = true; });
    thread_.join();
  }

  void announce(const std::string& name, const std::string& value) override {
    change([&] { wanted_[name] = value; });
  }
  void withdraw(const std::string& name) override {
    change([&] { wanted_.erase(name); });
  }
  void watch(const std::string& name, std::function<void(const std::string& value)> on_change) override {
    change([&] { watches_.push_back({name, std::move(on_change)}); });
  }
  RegistryState state() const override {
    std::lock_guard lock(mutex_);
    return state_;
  }

 private:
  struct Watch {
    std::string name;
    std::function<void(const std::string& value)> on_change;
    std::string told = {};
  };

  template <class F>
  void change(F&& f) {
    std::lock_guard lock(mutex_);
    f();
    changed_ = true;
    wake_.notify_all();
  }

  std::string key(const std::string& name) const { return to_base64(prefix_ + name); }

  void run() {
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      changed_ = false;
      lock.unlock();
      std::string trouble;
      try {
        trouble = turn();
      } catch (const Error& error) {
        trouble = error.message;
        if (error.code == ErrorCode::not_found) forget_lease();
      }
      lock.lock();
      state_.trouble = trouble;
      wake_.wait_for(lock, kTurn, [this] { return changed_; });
    }
    const bool reachable = state_.trouble.empty();
    lock.unlock();
    if (!lease_.empty() && reachable)
      (void)http_->fetch({.target = "/v3/lease/revoke", .body = json_text({{"ID", lease_}}), .timeout_s = 1});
  }

  // Renews the lease, sends changed names and asks for watched ones. Returns what keeps a name from being announced.
  std::string turn() {
    renew();
    std::unique_lock lock(mutex_);
    const std::map<std::string, std::string> wanted = wanted_;
    std::vector<Watch*> watches;
    for (Watch& watch : watches_) watches.push_back(&watch);
    lock.unlock();
    for (const auto& [name, value] : std::map(held_))
      if (!wanted.contains(name)) remove(name);
    std::string trouble;
    for (const auto& [name, value] : wanted)
      if (const auto held = held_.find(name); held == held_.end() || held->second != value)
        if (!put(name, value)) trouble = "another process holds the name '" + name + "'";
    for (Watch* watch : watches) look(*watch);
    return trouble;
  }

  void renew() {
    if (!lease_.empty() && clock_.now() < keep_alive_at_s_) return;
    if (!lease_.empty()) {
      const json answer = call("/v3/lease/keepalive", {{"ID", lease_}});
      const json* result = find_field(answer, "result");
      const std::string left = result ? word(*result, "TTL") : "";
      if (left.empty() || left[0] == '-' || left == "0") forget_lease();
    }
    if (lease_.empty()) lease_ = word(call("/v3/lease/grant", {{"TTL", std::to_string(int64_t(ttl_s_))}}), "ID");
    keep_alive_at_s_ = clock_.now() + ttl_s_ / 3;
  }

  json holder_is_us(const std::string& name) const {
    return {{"key", key(name)}, {"target", "LEASE"}, {"result", "EQUAL"}, {"lease", lease_}};
  }

  void remove(const std::string& name) {
    const json remove = {{"request_delete_range", {{"key", key(name)}}}};
    call("/v3/kv/txn", {{"compare", json::array({holder_is_us(name)})}, {"success", json::array({remove})}});
    held_.erase(name);
    show_held();
  }

  // If the name is ours, changes its value. Otherwise takes it only if nobody holds it. False: another process holds
  // it.
  bool put(const std::string& name, const std::string& value) {
    const bool ours = held_.contains(name);
    const json nobody = {{"key", key(name)}, {"target", "CREATE"}, {"result", "EQUAL"}, {"create_revision", "0"}};
    const json fields = {{"key", key(name)}, {"value", to_base64(value)}, {"lease", lease_}};
    const json put = {{"request_put", fields}}, look = {{"request_range", {{"key", key(name)}}}};
    const json answer = call("/v3/kv/txn", {{"compare", json::array({ours ? holder_is_us(name) : nobody})},
                                            {"success", json::array({put})},
                                            {"failure", json::array({look})}});
    held_.erase(name);
    const json* succeeded = find_field(answer, "succeeded");
    const json::json_pointer holder("/responses/0/response_range/kvs/0");
    bool taken = false;
    if (succeeded && succeeded->is_boolean() && succeeded->get<bool>()) {
      held_[name] = value;
    } else if (answer.contains(holder)) {  // otherwise it was removed meanwhile, and the next turn finds it free
      // An earlier call of ours may have succeeded although its answer was lost.
      taken = word(answer.at(holder), "lease") != lease_;
      if (!taken) held_[name] = from_base64(word(answer.at(holder), "value"));
    }
    show_held();
    return !taken;
  }

  void look(Watch& watch) {
    const json answer = call("/v3/kv/range", {{"key", key(watch.name)}});
    const json::json_pointer holder("/kvs/0");
    const std::string value = answer.contains(holder) ? from_base64(word(answer.at(holder), "value")) : "";
    if (value != std::exchange(watch.told, value)) watch.on_change(value);
  }

  // Throws an Error if there is no good answer.
  json call(const char* target, const json& body) {
    const HttpCall request = {.target = target, .body = json_text(body), .timeout_s = std::clamp(ttl_s_ / 3, 0.5, 2.0)};
    json answer = need(parse_json(need(http_->fetch(request)), std::string("etcd ") + target));
    if (!answer.is_object()) throw invalid(std::string(target) + ": the answer is not an object");
    return answer;
  }

  // etcd has forgotten this process: start again with a new lease.
  void forget_lease() {
    lease_.clear();
    held_.clear();
    show_held();
  }

  void show_held() {
    std::lock_guard lock(mutex_);
    state_.held.clear();
    for (const auto& [name, value] : held_) state_.held.insert(name);
  }

  std::unique_ptr<HttpClient> http_;
  const std::string prefix_;
  const double ttl_s_;
  Clock& clock_;

  // ---- Members of the thread.
  std::string lease_;                        // as etcd writes it; "": none
  std::map<std::string, std::string> held_;  // announced under this lease, with these values
  double keep_alive_at_s_ = 0;

  mutable std::mutex mutex_;  // guards the members below
  std::condition_variable wake_;
  std::map<std::string, std::string> wanted_;
  std::deque<Watch> watches_;  // only grows at its end, so the thread may use its entries without the mutex
  RegistryState state_;
  bool stopping_ = false, changed_ = false;
  std::thread thread_;
};

}  // namespace

Result<std::unique_ptr<Registry>> open_etcd(const std::string& url, double ttl_s, Clock& clock) {
  auto bad = [&](const std::string& why) {
    return invalid("registry '" + url + "': " + why + "; expected etcd://HOST:PORT[/prefix]");
  };
  if (!url.starts_with("etcd://")) return bad("it does not begin with etcd://");
  if (ttl_s < 2) return bad("the time to live is below 2 s");
  Result<HttpUrl> http_url = parse_http_url("http://" + url.substr(7));
  if (!http_url) return bad("the address is not valid");
  HttpUrl place = http_url.value();
  std::string prefix = place.prefix.empty() ? "/xpyd/" : place.prefix + "/";
  place.prefix.clear();
  Result<std::unique_ptr<HttpClient>> http = HttpClient::create(place, {});
  if (!http) return http.error();
  return std::unique_ptr<Registry>(new EtcdRegistry(std::move(http).value(), std::move(prefix), ttl_s, clock));
}

}  // namespace xpyd::server
