// HandleTable: small integers for objects that come and go. An object keeps its heap memory for the next user of its
// handle (T::clear() must keep capacity), so that a steady state allocates nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"

namespace xpyd::allocator {

template <class T>
class HandleTable {
 public:
  int32_t add() {
    if (unused_.empty()) {
      unused_.push_back(int32_t(items_.size()));
      items_.push_back(std::make_unique<Item>());  // references to the others stay valid
    }
    int32_t handle = unused_.back();
    unused_.pop_back();
    items_[size_t(handle)]->live = true;
    return handle;
  }
  T& operator[](int32_t handle) { return find(handle).value; }
  const T& operator[](int32_t handle) const { return const_cast<HandleTable*>(this)->find(handle).value; }
  void remove(int32_t handle) {
    Item& item = find(handle);
    item.live = false;
    item.value.clear();
    unused_.push_back(handle);
  }
  template <class F>
  void for_each(F&& f) const {
    for (const auto& item : items_)
      if (item->live) f(item->value);
  }

 private:
  struct Item {
    T value;
    bool live = false;
  };
  Item& find(int32_t handle) {
    XPYD_CHECK(handle >= 0 && size_t(handle) < items_.size() && items_[size_t(handle)]->live,
               "handle " + std::to_string(handle) + " is not in use");
    return *items_[size_t(handle)];
  }
  std::vector<std::unique_ptr<Item>> items_;
  std::vector<int32_t> unused_;
};

}  // namespace xpyd::allocator
