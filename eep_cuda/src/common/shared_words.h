// Access to words that another process, or another thread, reads or writes while we do.
#ifndef EEP_COMMON_SHARED_WORDS_H_
#define EEP_COMMON_SHARED_WORDS_H_

#include <atomic>

namespace eep {

template <typename T>
T load_acquire(const T& word) {
  return std::atomic_ref<T>(const_cast<T&>(word)).load(std::memory_order_acquire);
}
template <typename T>
T load_relaxed(const T& word) {
  return std::atomic_ref<T>(const_cast<T&>(word)).load(std::memory_order_relaxed);
}
template <typename T>
void store_release(T& word, T value) {
  std::atomic_ref<T>(word).store(value, std::memory_order_release);
}
template <typename T>
void store_relaxed(T& word, T value) {
  std::atomic_ref<T>(word).store(value, std::memory_order_relaxed);
}
template <typename T>
void set_bits(T& word, T bits) {
  std::atomic_ref<T>(word).fetch_or(bits, std::memory_order_relaxed);
}

}  // namespace eep

#endif  // EEP_COMMON_SHARED_WORDS_H_
