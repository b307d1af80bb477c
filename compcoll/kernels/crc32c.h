// The checksum of wires: CRC-32C with polynomial 0x1edc6f41, bits reflected (RFC 3720, section 12.1; test vectors in B.4).
#pragma once

#include <cstddef>
#include <cstdint>

namespace compcoll {

uint32_t crc32c(const uint8_t* bytes, size_t n);

// The same checksum without the CPU's instruction.
uint32_t crc32c_portable(const uint8_t* bytes, size_t n);

}  // namespace compcoll
