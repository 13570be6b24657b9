// Loads of data that the same thread writes afterwards. They bypass the read-only cache, which
// `load_vector` uses.
#pragma once

#include "device.cuh"

/// 16 bytes from an address that is a multiple of 16.
template <class T>
DEVICE Vector<T> load_own(const T *at) {
    return {*reinterpret_cast<const uint4 *>(at)};
}
