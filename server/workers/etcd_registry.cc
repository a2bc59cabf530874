// Registry over etcd v3. It uses etcd's JSON gateway, so plain HTTP suffices. A process has one lease and renews it at
// a third of its time. Names are keys under that lease. A watch is a stream that begins with a snapshot, and begins
// anew after a lost stream.
//
// After an outage the lease is checked. If etcd still has it, nothing happened. If it has expired (or etcd lost its
// data), a new lease is taken and every name is announced again.
//
// It is in this folder because it speaks HTTP. Folders below know only the interface.

#include <nettle/base64.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>
#include <vector>

#include "base/json/json.h"
#include "server/http/http_client.h"
#include "server/workers/local_workers.h"

namespace xpyd::server {
namespace {

using nlohmann::json;

constexpr size_t kMaxAnswerBytes = 16 << 20;
constexpr double kPauseSeconds = 0.5;   // after a failure
constexpr double kStreamSeconds = 1e8;  // a watch has no end of its own

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
    stopping_ = true;
    thread_.join();
  }

  void announce(const std::string& name, const std::string& value) override {
    std::lock_guard lock(mutex_);
    wanted_[name] = value;
  }

  void withdraw(const std::string& name) override {
    std::lock_guard lock(mutex_);
    wanted_.erase(name);
  }

  void watch(const std::string& prefix, std::function<void(const Entries&)> on_change) override {
    std::lock_guard lock(mutex_);
    new_watches_.push_back({prefix, std::move(on_change)});
  }

  RegistryState state() const override {
    std::lock_guard lock(mutex_);
    return state_;
  }

 private:
  struct Watch {
    std::string prefix;
    std::function<void(const Entries&)> on_change;
    enum class Stage { stale, asking, streaming } stage = Stage::stale;
    Entries entries;
    std::optional<Entries> told;
    std::string lines;  // unfinished line of the stream
  };
  using OnAnswer = std::function<void(const json&)>;

  std::string key(const std::string& name) const { return to_base64(prefix_ + name); }
  json range(const std::string& prefix) const {
    std::string end = prefix_ + prefix;
    ++end.back();  // never 0xff, because the last byte is of a name or '/'
    return {{"key", key(prefix)}, {"range_end", to_base64(end)}};
  }

  void run() {
    while (!stopping_) {
      {
        std::lock_guard lock(mutex_);
        for (auto& [prefix, on_change] : std::exchange(new_watches_, {}))
          watches_.push_back({prefix, std::move(on_change)});
      }
      if (std::exchange(odd_stream_, false)) lost("/v3/watch: the stream is not valid");
      if (!calling_ && clock_.now() >= pause_until_s_) next_call();
      http_->poll(0.1);
    }
    http_->abort_all();
    if (!lease_.empty() && state().reachable)
      (void)http_->fetch({.target = "/v3/lease/revoke", .body = json_text({{"ID", lease_}}), .timeout_s = 1});
  }

  // Starts the most urgent call that is due, if any.
  void next_call() {
    const double now = clock_.now();
    if (lease_.empty())
      return call("/v3/lease/grant", {{"TTL", std::to_string(int64_t(ttl_s_))}}, [this](const json& answer) {
        lease_ = word(answer, "ID");
        keep_alive_at_s_ = clock_.now() + ttl_s_ / 3;
      });
    if (now >= keep_alive_at_s_)
      return call("/v3/lease/keepalive", {{"ID", lease_}}, [this](const json& answer) {
        keep_alive_at_s_ = clock_.now() + ttl_s_ / 3;
        const json* result = answer.is_object() ? find_field(answer, "result") : nullptr;
        std::string left = result ? word(*result, "TTL") : "";
        if (left.empty() || left[0] == '-' || left == "0") forget_lease();
      });
    std::optional<std::string> add, remove;
    std::string value;
    {
      std::lock_guard lock(mutex_);
      for (auto& [name, held] : held_)
        if (!wanted_.count(name)) remove = name;
      for (auto& [name, want] : wanted_) {
        auto held = held_.find(name);
        if (held != held_.end() && held->second == want) continue;
        if (auto taken = taken_until_s_.find(name); taken != taken_until_s_.end() && now < taken->second) continue;
        add = name;
        value = want;
      }
    }
    if (remove) return call_remove(*remove);
    if (add) return call_put(*add, value);
    for (size_t i = 0; i < watches_.size(); ++i)
      if (watches_[i].stage == Watch::Stage::stale) return call_snapshot(i);
  }

  json holder_is_us(const std::string& name) const {
    return {{"key", key(name)}, {"target", "LEASE"}, {"result", "EQUAL"}, {"lease", lease_}};
  }

  void call_remove(const std::string& name) {
    json remove = {{"request_delete_range", {{"key", key(name)}}}};
    call("/v3/kv/txn", {{"compare", json::array({holder_is_us(name)})}, {"success", json::array({remove})}},
         [this, name](const json&) { lose(name); });
  }

  void hold(const std::string& name, const std::string& value) {
    held_[name] = value;
    std::lock_guard lock(mutex_);
    state_.held.insert(name);
  }

  void lose(const std::string& name) {
    held_.erase(name);
    std::lock_guard lock(mutex_);
    state_.held.erase(name);
  }

  void call_put(const std::string& name, const std::string& value) {
    // If the name is ours, change its value. Otherwise take it only if nobody holds it.
    const bool ours = held_.count(name) > 0;
    json nobody = {{"key", key(name)}, {"target", "CREATE"}, {"result", "EQUAL"}, {"create_revision", "0"}};
    json fields = {{"key", key(name)}, {"value", to_base64(value)}, {"lease", lease_}};
    json put = {{"request_put", fields}};
    json look = {{"request_range", {{"key", key(name)}}}};
    call("/v3/kv/txn",
         {{"compare", json::array({ours ? holder_is_us(name) : nobody})},
          {"success", json::array({put})},
          {"failure", json::array({look})}},
         [this, name, value](const json& answer) {
           const json* succeeded = find_field(answer, "succeeded");
           if (succeeded && succeeded->is_boolean() && succeeded->get<bool>()) {
             hold(name, value);
             taken_until_s_.erase(name);
             return;
           }
           lose(name);
           const json::json_pointer holder("/responses/0/response_range/kvs/0");
           if (!answer.contains(holder)) return;  // removed meanwhile: the next try finds it free
           // An earlier call of ours may have succeeded although its answer was lost.
           if (word(answer.at(holder), "lease") == lease_) {
             hold(name, from_base64(word(answer.at(holder), "value")));
             return;
           }
           taken_until_s_[name] = clock_.now() + kPauseSeconds;
           std::lock_guard lock(mutex_);
           state_.trouble = "another process holds the name '" + name + "'";
         });
  }

  void call_snapshot(size_t i) {
    watches_[i].stage = Watch::Stage::asking;
    call("/v3/kv/range", range(watches_[i].prefix), [this, i](const json& answer) {
      Watch& watch = watches_[i];
      watch.entries.clear();
      if (const json* kvs = find_field(answer, "kvs"); kvs && kvs->is_array())
        for (const json& kv : *kvs) put_entry(watch, kv);
      const json* header = find_field(answer, "header");
      start_stream(i, header ? word(*header, "revision") : "");
      tell(watch);
    });
  }

  void put_entry(Watch& watch, const json& kv) {
    std::string name = from_base64(word(kv, "key"));
    if (name.starts_with(prefix_)) watch.entries[name.substr(prefix_.size())] = from_base64(word(kv, "value"));
  }

  void tell(Watch& watch) {
    if (watch.told == watch.entries) return;
    watch.told = watch.entries;
    watch.on_change(watch.entries);
  }

  void start_stream(size_t i, const std::string& revision) {
    Watch& watch = watches_[i];
    watch.stage = Watch::Stage::streaming;
    watch.lines.clear();
    json create = range(watch.prefix);
    create["start_revision"] = std::to_string(std::atoll(revision.c_str()) + 1);
    http_->start(
        {.target = "/v3/watch", .body = json_text({{"create_request", create}}), .timeout_s = kStreamSeconds},
        [this, i](int, std::string_view bytes) { read_stream(watches_[i], bytes); },
        [this, i](const HttpOutcome&) {
          watches_[i].stage = Watch::Stage::stale;
          pause_until_s_ = clock_.now() + kPauseSeconds;
        });
  }

  // Reads one JSON object per line. After a malformed one, all streams begin again.
  void read_stream(Watch& watch, std::string_view bytes) {
    if (odd_stream_) return;
    watch.lines += bytes;
    odd_stream_ = watch.lines.size() > kMaxAnswerBytes;
    for (size_t end; !odd_stream_ && (end = watch.lines.find('\n')) != std::string::npos;) {
      Result<json> line = parse_json(std::string_view(watch.lines).substr(0, end), "etcd watch");
      watch.lines.erase(0, end + 1);
      odd_stream_ = !line || !take_events(watch, line.value());
    }
    tell(watch);
  }

  bool take_events(Watch& watch, const json& line) {
    const json* result = line.is_object() ? find_field(line, "result") : nullptr;
    if (!result || !result->is_object() || find_field(*result, "canceled")) return false;
    const json* events = find_field(*result, "events");
    if (!events || !events->is_array()) return true;  // "created"
    for (const json& event : *events) {
      const json* kv = event.is_object() ? find_field(event, "kv") : nullptr;
      if (!kv) return false;
      if (word(event, "type") != "DELETE") {
        put_entry(watch, *kv);
      } else if (std::string name = from_base64(word(*kv, "key")); name.starts_with(prefix_)) {
        watch.entries.erase(name.substr(prefix_.size()));
      }
    }
    return true;
  }

  void call(const char* target, const json& body, OnAnswer on_answer) {
    calling_ = true;
    auto text = std::make_shared<std::string>();
    http_->start(
        {.target = target, .body = json_text(body), .timeout_s = std::clamp(ttl_s_ / 3, 0.5, 2.0)},
        [text](int, std::string_view bytes) {
          if (text->size() + bytes.size() <= kMaxAnswerBytes) *text += bytes;
        },
        [this, target, text, on_answer = std::move(on_answer)](const HttpOutcome& outcome) {
          calling_ = false;
          if (!outcome.error.empty()) return lost(std::string(target) + ": " + outcome.error);
          Result<json> answer = parse_json(*text, std::string("etcd ") + target);
          if (outcome.status != 200) {
            std::string why = answer ? word(answer.value(), "error") : "";
            if (why.find("lease not found") != std::string::npos) return forget_lease();
            return lost(std::string(target) + ": " + std::to_string(outcome.status) + " " + why);
          }
          if (!answer) return lost(answer.error().message);
          if (!answer.value().is_object()) return lost(std::string(target) + ": the answer is not an object");
          {
            std::lock_guard lock(mutex_);
            state_.reachable = true;
            state_.trouble.clear();
          }
          on_answer(answer.value());
        });
  }

  // etcd has forgotten this process: start again with a new lease.
  void forget_lease() {
    lease_.clear();
    held_.clear();
    taken_until_s_.clear();
    std::lock_guard lock(mutex_);
    state_.held.clear();
    ++state_.lost_leases;
  }

  // The streams may be dead without notice, so all begin again with a snapshot.
  void lost(const std::string& why) {
    calling_ = false;
    pause_until_s_ = clock_.now() + kPauseSeconds;
    http_->abort_all();
    for (Watch& watch : watches_) watch.stage = Watch::Stage::stale;
    std::lock_guard lock(mutex_);
    if (state_.reachable) ++state_.outages;
    state_.reachable = false;
    state_.trouble = why;
  }

  std::unique_ptr<HttpClient> http_;
  const std::string prefix_;
  const double ttl_s_;
  Clock& clock_;

  // ---- Members of the thread.
  std::string lease_;                        // as etcd writes it; "": none
  std::map<std::string, std::string> held_;  // announced under this lease, with these values
  std::map<std::string, double> taken_until_s_;
  std::deque<Watch> watches_;  // never shrinks: callbacks use indices
  double keep_alive_at_s_ = 0, pause_until_s_ = 0;
  bool odd_stream_ = false;
  bool calling_ = false;  // one call at a time, besides the streams

  mutable std::mutex mutex_;
  std::map<std::string, std::string> wanted_;
  std::vector<std::pair<std::string, std::function<void(const Entries&)>>> new_watches_;
  RegistryState state_;
  std::atomic<bool> stopping_{false};
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
