#include "cpu/reduce.h"

#include <algorithm>
#include <bit>
#include <concepts>
#include <cstddef>
#include <type_traits>

#include "cpu/formats.h"

namespace eep {
namespace {

// ---- types: how an element lies in memory, and as what it is added up ----

template <typename T, typename A = T>
struct Plain {
  using Stored = T;
  using Sum = A;
  static A load(T value) { return static_cast<A>(value); }
  static T store(A value) { return static_cast<T>(value); }
};
struct Bf16 {
  using Stored = uint16_t;
  using Sum = float;
  static float load(uint16_t value) { return float_of_bf16(value); }
  static uint16_t store(float value) { return bf16_of_float(value); }
};
struct F16 {
  using Stored = uint16_t;
  using Sum = float;
  static float load(uint16_t value) { return float_of_f16(value); }
  static uint16_t store(float value) { return f16_of_float(value); }
};
// A byte that may come from anywhere: what is not 0 is true.
struct Bool {
  using Stored = uint8_t;
  using Sum = uint8_t;
  static uint8_t load(uint8_t value) { return value != 0; }
  static uint8_t store(uint8_t value) { return value; }
};

// ---- operations ----

// Integers wrap around, in a type in which that is defined.
template <typename T>
using Wrapping = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

struct Add {
  template <std::integral T>
  static T of(T a, T b) {
    return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
  }
  static float of(float a, float b) { return a + b; }
  static double of(double a, double b) { return a + b; }
};
struct Multiply {
  template <std::integral T>
  static T of(T a, T b) {
    return static_cast<T>(static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b));
  }
  static float of(float a, float b) { return a * b; }
  static double of(double a, double b) { return a * b; }
};
// A NaN on either side is the result.
struct Min {
  template <typename T>
  static T of(T a, T b) {
    if constexpr (std::floating_point<T>) return a != a ? a : (b < a || b != b) ? b : a;
    return b < a ? b : a;
  }
};
struct Max {
  template <typename T>
  static T of(T a, T b) {
    if constexpr (std::floating_point<T>) return a != a ? a : (b > a || b != b) ? b : a;
    return b > a ? b : a;
  }
};
struct And {
  template <std::integral T>
  static T of(T a, T b) {
    return a & b;
  }
};
struct Or {
  template <std::integral T>
  static T of(T a, T b) {
    return a | b;
  }
};
struct Xor {
  template <std::integral T>
  static T of(T a, T b) {
    return a ^ b;
  }
};

// ---- loops, each on its own with pointers that do not overlap, so that several elements are taken at a time ----

template <typename Type, typename Op>
[[gnu::noinline]] void first_two(const typename Type::Stored* __restrict a, const typename Type::Stored* __restrict b,
                                 typename Type::Sum* __restrict sum, size_t size) {
  for (size_t i = 0; i < size; ++i) sum[i] = Op::of(Type::load(a[i]), Type::load(b[i]));
}
template <typename Type, typename Op>
[[gnu::noinline]] void one_more(const typename Type::Stored* __restrict a, typename Type::Sum* __restrict sum,
                                size_t size) {
  for (size_t i = 0; i < size; ++i) sum[i] = Op::of(sum[i], Type::load(a[i]));
}
template <typename Type>
[[gnu::noinline]] void only_one(const typename Type::Stored* __restrict a, typename Type::Sum* __restrict sum,
                                size_t size) {
  for (size_t i = 0; i < size; ++i) sum[i] = Type::load(a[i]);
}
template <typename Type, bool average>
[[gnu::noinline]] void finish(const typename Type::Sum* __restrict sum, typename Type::Stored* __restrict out,
                              uint32_t count, size_t size) {
  const auto divisor = static_cast<typename Type::Sum>(count);
  for (size_t i = 0; i < size; ++i) out[i] = Type::store(average ? sum[i] / divisor : sum[i]);
}

// In blocks, so that the partial sums stay in L1; in the output itself where they are of its type.
template <typename Type, typename Op, bool average = false>
void reduce(const uint8_t* const* sources, uint32_t count, uint64_t bytes, uint8_t* out) {
  using Stored = typename Type::Stored;
  using Sum = typename Type::Sum;
  constexpr size_t kBlock = 1024;
  constexpr bool in_place = std::is_same_v<Stored, Sum>;
  Sum block[in_place ? 1 : kBlock];
  const size_t size = bytes / sizeof(Stored);
  for (size_t begin = 0; begin < size; begin += kBlock) {
    const size_t here = std::min(kBlock, size - begin);
    const auto source = [&](uint32_t i) { return reinterpret_cast<const Stored*>(sources[i]) + begin; };
    Stored* to = reinterpret_cast<Stored*>(out) + begin;
    Sum* sum = block;
    if constexpr (in_place) sum = to;
    if (count == 1)
      only_one<Type>(source(0), sum, here);
    else
      first_two<Type, Op>(source(0), source(1), sum, here);
    for (uint32_t i = 2; i < count; ++i) one_more<Type, Op>(source(i), sum, here);
    if constexpr (!in_place) {
      finish<Type, average>(sum, to, count, here);
    } else if constexpr (average) {
      for (size_t i = 0; i < here; ++i) to[i] /= static_cast<Sum>(count);
    }
  }
}

template <typename Type>
Reduce of_floats(uint32_t reduction) {
  switch (reduction) {
    case EEP_SUM:
      return reduce<Type, Add>;
    case EEP_AVG:
      return reduce<Type, Add, true>;
    case EEP_MIN:
      return reduce<Type, Min>;
    case EEP_MAX:
      return reduce<Type, Max>;
    case EEP_PROD:
      return reduce<Type, Multiply>;
  }
  return nullptr;
}

template <typename T>
Reduce of_integers(uint32_t reduction) {
  using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
  switch (reduction) {
    case EEP_SUM:
      return reduce<Plain<T>, Add>;
    case EEP_AVG:  // of the sum itself, not of what is left of it in the type
      return reduce<Plain<T, Wide>, Add, true>;
    case EEP_MIN:
      return reduce<Plain<T>, Min>;
    case EEP_MAX:
      return reduce<Plain<T>, Max>;
    case EEP_PROD:
      return reduce<Plain<T>, Multiply>;
    case EEP_BAND:
      return reduce<Plain<T>, And>;
    case EEP_BOR:
      return reduce<Plain<T>, Or>;
    case EEP_BXOR:
      return reduce<Plain<T>, Xor>;
  }
  return nullptr;
}

Reduce of_bools(uint32_t reduction) {
  switch (reduction) {
    case EEP_SUM:
    case EEP_MAX:
    case EEP_BOR:
      return reduce<Bool, Or>;
    case EEP_PROD:
    case EEP_MIN:
    case EEP_BAND:
      return reduce<Bool, And>;
    case EEP_BXOR:
      return reduce<Bool, Xor>;
  }
  return nullptr;
}

}  // namespace

uint32_t element_size(uint32_t element) {
  switch (element) {
    case EEP_ELEMENT_U8:
    case EEP_ELEMENT_I8:
    case EEP_ELEMENT_BOOL:
    case EEP_ELEMENT_BYTES:
      return 1;
    case EEP_ELEMENT_U16:
    case EEP_ELEMENT_I16:
    case EEP_ELEMENT_F16:
    case EEP_ELEMENT_BF16:
      return 2;
    case EEP_ELEMENT_U32:
    case EEP_ELEMENT_I32:
    case EEP_ELEMENT_F32:
      return 4;
    case EEP_ELEMENT_U64:
    case EEP_ELEMENT_I64:
    case EEP_ELEMENT_F64:
      return 8;
  }
  return 0;
}

Reduce find_reduce(uint32_t element, uint32_t reduction) {
  switch (element) {
    case EEP_ELEMENT_U8:
      return of_integers<uint8_t>(reduction);
    case EEP_ELEMENT_I8:
      return of_integers<int8_t>(reduction);
    case EEP_ELEMENT_U16:
      return of_integers<uint16_t>(reduction);
    case EEP_ELEMENT_I16:
      return of_integers<int16_t>(reduction);
    case EEP_ELEMENT_U32:
      return of_integers<uint32_t>(reduction);
    case EEP_ELEMENT_I32:
      return of_integers<int32_t>(reduction);
    case EEP_ELEMENT_U64:
      return of_integers<uint64_t>(reduction);
    case EEP_ELEMENT_I64:
      return of_integers<int64_t>(reduction);
    case EEP_ELEMENT_F16:
      return of_floats<F16>(reduction);
    case EEP_ELEMENT_BF16:
      return of_floats<Bf16>(reduction);
    case EEP_ELEMENT_F32:
      return of_floats<Plain<float>>(reduction);
    case EEP_ELEMENT_F64:
      return of_floats<Plain<double>>(reduction);
    case EEP_ELEMENT_BOOL:
      return of_bools(reduction);
  }
  return nullptr;
}

}  // namespace eep
