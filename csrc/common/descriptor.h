// What the fields of a call's descriptor mean, and how ranks that disagree are told so.
#pragma once

#include <functional>
#include <string>

#include "common/layout.h"

namespace coconet {

enum class FieldKind { integer, real, dtype, reduction, split, flag, shape };

struct FieldSpec {
    const char* name;
    FieldKind kind;
    bool may_differ = false;
};

const char* op_name(OpCode op);
const char* dtype_name(DType dtype);
// Names the dtypes from DType::other on; set by the layer above.
extern const char* (*other_dtype_name)(int number);
// num_fields fields; the last one may be a shape, which takes all that remain.
const FieldSpec* op_fields(OpCode op);

// Builds a descriptor field by field, in the order of op_fields.
class DescriptorBuilder {
  public:
    explicit DescriptorBuilder(OpCode op) {
        d.op = op;
        d.num_fields = 0;
        for (int64_t& operand : d.operands) operand = 0;
    }
    DescriptorBuilder& add(int64_t value) {
        if (d.num_fields < kMaxFields) d.fields[d.num_fields++] = value;
        return *this;
    }
    DescriptorBuilder& add(double value) {
        int64_t bits;
        __builtin_memcpy(&bits, &value, sizeof bits);
        return add(bits);
    }
    DescriptorBuilder& add_shape(const int64_t* sizes, int64_t dims) {
        add(dims);
        for (int64_t i = 0; i < dims; ++i) add(sizes[i]);
        return *this;
    }
    Descriptor d;
};

// One value per rank, as "4 on rank 0; 5 on ranks 1, 2".
std::string by_value(int world, const std::function<std::string(int)>& value);

// Empty when all ranks agree; otherwise what they disagree about.
std::string disagreement(const Descriptor* const* ranks, int world);

}  // namespace coconet
