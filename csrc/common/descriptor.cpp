#include "common/descriptor.h"

#include <string.h>

#include <map>
#include <sstream>
#include <vector>

namespace coconet {

const char* (*other_dtype_name)(int) = [](int) { return "another dtype"; };

namespace {

const char* const kReductions[] = {"sum", "avg"};
const char* const kSplits[] = {"tensor_split", "chunk", "rows"};

std::string describe(const Descriptor& d, int field, FieldKind kind) {
    const int64_t value = d.fields[field];
    std::ostringstream out;
    switch (kind) {
        case FieldKind::integer:
            out << value;
            break;
        case FieldKind::real: {
            double real;
            memcpy(&real, &value, sizeof real);
            out.precision(17);
            out << real;
            break;
        }
        case FieldKind::dtype:
            out << dtype_name(static_cast<DType>(value));
            break;
        case FieldKind::reduction:
            out << kReductions[value];
            break;
        case FieldKind::split:
            out << kSplits[value];
            break;
        case FieldKind::flag:
            out << (value ? "True" : "False");
            break;
        case FieldKind::shape:
            out << "[";
            for (int i = field + 1; i < d.num_fields; ++i)
                out << (i > field + 1 ? ", " : "") << d.fields[i];
            out << "]";
            break;
    }
    return out.str();
}

bool same_field(const Descriptor& a, const Descriptor& b, int field, FieldKind kind) {
    if (kind != FieldKind::shape) return a.fields[field] == b.fields[field];
    return a.num_fields == b.num_fields && memcmp(a.fields + field, b.fields + field,
                                                  (a.num_fields - field) * sizeof(int64_t)) == 0;
}

}  // namespace

std::string by_value(int world, const std::function<std::string(int)>& value) {
    std::vector<std::string> order;
    std::map<std::string, std::vector<int>> ranks;
    for (int r = 0; r < world; ++r) {
        const std::string text = value(r);
        if (ranks[text].empty()) order.push_back(text);
        ranks[text].push_back(r);
    }
    std::ostringstream out;
    for (size_t k = 0; k < order.size(); ++k) {
        const auto& who = ranks[order[k]];
        out << (k ? "; " : "") << order[k] << (who.size() > 1 ? " on ranks " : " on rank ");
        for (size_t i = 0; i < who.size(); ++i) out << (i ? ", " : "") << who[i];
    }
    return out.str();
}

const char* op_name(OpCode op) {
    switch (op) {
        case OpCode::none:
        case OpCode::rejected:
            return "(rejected call)";
        case OpCode::barrier:
            return "barrier";
        case OpCode::empty:
        case OpCode::touch:
            return "empty";
        case OpCode::all_reduce:
            return "all_reduce";
        case OpCode::reduce_scatter:
            return "reduce_scatter";
        case OpCode::all_gather:
            return "all_gather";
        case OpCode::rs_adam_ag:
            return "rs_adam_ag_";
        case OpCode::ping:
            return "ping";
    }
    return "unknown";
}

const char* dtype_name(DType dtype) {
    switch (dtype) {
        case DType::f32:
            return "float32";
        case DType::bf16:
            return "bfloat16";
        case DType::f16:
            return "float16";
        case DType::f64:
            return "float64";
        case DType::i64:
            return "int64";
        case DType::i32:
            return "int32";
        case DType::i16:
            return "int16";
        case DType::i8:
            return "int8";
        case DType::u8:
            return "uint8";
        case DType::boolean:
            return "bool";
        case DType::c64:
            return "complex64";
        case DType::c128:
            return "complex128";
        default:
            return other_dtype_name(static_cast<int>(dtype) - static_cast<int>(DType::other));
    }
}

const FieldSpec* op_fields(OpCode op) {
    using K = FieldKind;
    static constexpr FieldSpec kEmpty[] = {{"bytes", K::integer}};
    static constexpr FieldSpec kAllReduce[] = {
        {"dtype", K::dtype}, {"op", K::reduction}, {"in-place", K::flag}, {"shape", K::shape}};
    static constexpr FieldSpec kReduceScatter[] = {{"dtype", K::dtype},
                                                   {"op", K::reduction},
                                                   {"split", K::split},
                                                   {"dim", K::integer},
                                                   {"shape", K::shape}};
    static constexpr FieldSpec kAllGather[] = {
        {"dtype", K::dtype},
        {"element size", K::integer},
        {"dim", K::integer},
        {"size (compiled code that gives none expects equal shards)", K::integer},
        {"rows", K::integer, true},
        {"shape (with 1 along dim)", K::shape}};
    static constexpr FieldSpec kAdam[] = {{"dtype", K::dtype},
                                          {"number of parameters", K::integer},
                                          {"lr", K::real},
                                          {"beta1", K::real},
                                          {"beta2", K::real},
                                          {"eps", K::real},
                                          {"weight_decay", K::real},
                                          {"adam_w_mode", K::flag},
                                          {"bias_correction", K::flag},
                                          {"average_grads", K::flag}};
    switch (op) {
        case OpCode::empty:
            return kEmpty;
        case OpCode::all_reduce:
            return kAllReduce;
        case OpCode::reduce_scatter:
            return kReduceScatter;
        case OpCode::all_gather:
            return kAllGather;
        case OpCode::rs_adam_ag:
            return kAdam;
        default:
            return nullptr;  // no fields
    }
}

std::string disagreement(const Descriptor* const* ranks, int world) {
    bool same_op = true;
    for (int r = 1; r < world; ++r) same_op = same_op && ranks[r]->op == ranks[0]->op;
    if (!same_op)
        return "ranks disagree on the call: " +
               by_value(world, [&](int r) { return std::string(op_name(ranks[r]->op)); });

    const FieldSpec* spec = op_fields(ranks[0]->op);
    for (int f = 0; f < ranks[0]->num_fields; ++f) {
        const FieldSpec& field = spec[f];
        bool same = true;
        for (int r = 1; r < world && !field.may_differ; ++r)
            same = same && same_field(*ranks[0], *ranks[r], f, field.kind);
        if (!same)
            return std::string(op_name(ranks[0]->op)) + ": ranks disagree on " + field.name + ": " +
                   by_value(world, [&](int r) { return describe(*ranks[r], f, field.kind); });
        if (field.kind == FieldKind::shape) break;
    }
    return "";
}

}  // namespace coconet
