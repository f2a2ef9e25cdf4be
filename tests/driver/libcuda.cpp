// A stand-in for the CUDA driver: memory is the host's, launches do nothing, and every call is held to its contract.
//
// It ends the process where the real driver would corrupt memory or hang: a copy, a tensor map or a pointer argument outside a live allocation, an
// impossible launch shape, an edge between nodes of two graphs or a programmatic one from what is no kernel. What happened goes to $DRIVER_LOG when the context is released.
// $DRIVER_FAIL=call:n:code makes the n-th such call fail; $DRIVER_VERSION, $DRIVER_GPUS and $DRIVER_MEMORY say what there is.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

typedef uint64_t Address;
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_IMAGE = 200, NOT_FOUND = 500 };

struct Function {
    std::string name;
    std::vector<size_t> parameters;
    bool is_ptx = false;
};
struct Module {
    std::vector<unsigned char> image;
    std::vector<unsigned char> variable = {};
};
struct Graph;
struct Node {
    Graph* graph;
    bool is_kernel;
};
struct Graph {
    std::vector<Node*> nodes;
    std::set<std::pair<Node*, Node*>> edges;
};
struct Executable {
    size_t nodes;
    bool uploaded = false;
};
struct EdgeData {
    unsigned char from_port, to_port, type, reserved[5];
};
struct KernelNodeParameters {
    void* function;
    unsigned grid[3], block[3], shared;
    void **arguments, **extra;
    void *kernel, *context;
};
struct LaunchConfig {
    unsigned grid[3], block[3], shared;
    void* stream;
    void* attributes;
    unsigned attribute_count;
};

static std::mutex lock;
static std::map<Address, size_t> allocations;
static std::map<std::string, int> calls;
static size_t device_bytes = 0, most_device_bytes = 0, copied_to = 0, copied_from = 0, allocated_late = 0;
// Of all graphs; and what was built or launched without one after the first replay.
static size_t kernel_nodes = 0, edges = 0, programmatic_edges = 0, built_late = 0, launched_late = 0;

static long setting(const char* name, long otherwise) {
    const char* text = getenv(name);
    return text ? atol(text) : otherwise;
}

static void refuse(const char* why, const std::string& what = "") {
    fprintf(stderr, "the driver's contract is broken: %s %s\n", why, what.c_str());
    abort();
}

// Counts a call; what it must answer with, if it is to fail.
static int called(const char* name) {
    std::lock_guard<std::mutex> guard(lock);
    int count = ++calls[name];
    const char* fail = getenv("DRIVER_FAIL");
    if (!fail) return SUCCESS;
    std::string text = fail;
    size_t first = text.find(':'), second = text.find(':', first + 1);
    bool is_meant = text.substr(0, first) == name && atoi(text.c_str() + first + 1) == count;
    return is_meant ? atoi(text.c_str() + second + 1) : SUCCESS;
}
#define CALLED(name)                    \
    if (int failed = called(#name)) {   \
        return failed;                  \
    }

static bool is_live(Address address, size_t bytes) {
    std::lock_guard<std::mutex> guard(lock);
    auto after = allocations.upper_bound(address);
    if (after == allocations.begin()) return false;
    auto block = std::prev(after);
    return address + bytes <= block->first + block->second;
}

static void take(Address address, size_t bytes, bool on_device) {
    std::lock_guard<std::mutex> guard(lock);
    allocations[address] = bytes;
    if (on_device) device_bytes += bytes;
    if (device_bytes > most_device_bytes) most_device_bytes = device_bytes;
    if (calls["cuGraphLaunch"] > 0) allocated_late++;
}

static void give_back(Address address, bool on_device) {
    std::lock_guard<std::mutex> guard(lock);
    if (!allocations.count(address)) refuse("freed what is not there");
    if (on_device) device_bytes -= allocations[address];
    allocations.erase(address);
}

static void check_launch(const unsigned* grid, const unsigned* block, Function* kernel, void** arguments) {
    bool fits = block[0] >= 1 && block[0] <= 1024;
    for (int i = 0; i < 3; i++) fits = fits && grid[i] >= 1;
    if (!fits) refuse("an impossible launch of", kernel->name);
    for (size_t i = 0; i < kernel->parameters.size(); i++) {
        bool is_pointer = kernel->parameters[i] == 8;
        if (is_pointer && !is_live(*(Address*)arguments[i], 0)) refuse("a pointer to nowhere for", kernel->name);
    }
}

static Node* add_node(Graph* graph, bool is_kernel) {
    graph->nodes.push_back(new Node{graph, is_kernel});
    return graph->nodes.back();
}

static void add_edge(Graph* graph, Node* from, Node* to) {
    if (from->graph != graph || to->graph != graph) refuse("an edge between two graphs");
    if (!graph->edges.insert({from, to}).second) refuse("an edge that is there already");
    edges++;
}

static size_t memory() { return (size_t)setting("DRIVER_MEMORY", 1L << 30); }

extern "C" {
int cuInit(unsigned) { return SUCCESS; }
int cuDriverGetVersion(int* version) { *version = (int)setting("DRIVER_VERSION", 13000); return SUCCESS; }
int cuDeviceGetCount(int* count) { *count = (int)setting("DRIVER_GPUS", 1); return SUCCESS; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return SUCCESS; }
int cuDeviceGetName(char* name, int length, int) { snprintf(name, length, "Stand-in GPU"); return SUCCESS; }
int cuDeviceTotalMem_v2(size_t* bytes, int) { *bytes = memory(); return SUCCESS; }
int cuDeviceGetAttribute(int* value, int attribute, int) {
    // Major version, SMs, shared memory of a block and of an SM, L2: those of an H200.
    switch (attribute) {
        case 75: *value = 9; break;
        case 16: *value = 132; break;
        case 97: *value = 227 << 10; break;
        case 81: *value = 228 << 10; break;
        case 38: *value = 50 << 20; break;
        default: *value = 0;
    }
    return SUCCESS;
}
int cuDevicePrimaryCtxRetain(void** context, int) { CALLED(cuDevicePrimaryCtxRetain) *context = (void*)1; return SUCCESS; }
int cuCtxSetCurrent(void*) { return SUCCESS; }

int cuDevicePrimaryCtxRelease_v2(int) {
    const char* path = getenv("DRIVER_LOG");
    FILE* log = path ? fopen(path, "w") : nullptr;
    if (!log) return SUCCESS;
    for (auto& call : calls) fprintf(log, "%s %d\n", call.first.c_str(), call.second);
    fprintf(log, "copied_to %zu\ncopied_from %zu\n", copied_to, copied_from);
    fprintf(log, "kernel_nodes %zu\nedges %zu\nprogrammatic_edges %zu\n", kernel_nodes, edges, programmatic_edges);
    fprintf(log, "built_late %zu\nlaunched_late %zu\n", built_late, launched_late);
    fprintf(log, "most_device_bytes %zu\nallocated_late %zu\nleft %zu\n", most_device_bytes, allocated_late, allocations.size());
    fclose(log);
    return SUCCESS;
}

int cuStreamCreate(void** stream, unsigned) { *stream = malloc(1); return SUCCESS; }
int cuStreamDestroy_v2(void* stream) { free(stream); return SUCCESS; }
int cuStreamWaitEvent(void*, void*, unsigned) { return SUCCESS; }
int cuStreamSynchronize(void*) { CALLED(cuStreamSynchronize) return SUCCESS; }
int cuGraphCreate(void** graph, unsigned) { CALLED(cuGraphCreate) *graph = new Graph; return SUCCESS; }
int cuGraphAddKernelNode_v2(void** node, void* graph, void** after, size_t count, const KernelNodeParameters* parameters) {
    CALLED(cuGraphAddKernelNode)
    check_launch(parameters->grid, parameters->block, (Function*)parameters->function, parameters->arguments);
    *node = add_node((Graph*)graph, true);
    kernel_nodes++;
    for (size_t i = 0; i < count; i++) add_edge((Graph*)graph, (Node*)after[i], (Node*)*node);
    return SUCCESS;
}
// Two dimensions of 16-bit values, as product_tiles has them: the rows must lie in a live allocation, aligned as bulk copies need it.
int cuTensorMapEncodeTiled(
    void* map, int, unsigned rank, void* address, const uint64_t* dims, const uint64_t* strides, const unsigned* box,
    const unsigned*, int, int, int, int
) {
    CALLED(cuTensorMapEncodeTiled)
    bool is_aligned = (Address)address % 16 == 0 && strides[0] % 16 == 0 && (Address)map % 64 == 0;
    if (rank != 2 || !is_aligned || dims[0] * 2 > strides[0] || box[0] * 2 != 128 || box[1] > 256) refuse("a tensor map that is none");
    if (!is_live((Address)address, dims[1] * strides[0])) refuse("a tensor map of nowhere");
    memset(map, 0, 128);
    return SUCCESS;
}
int cuGraphAddEventRecordNode(void** node, void* graph, void** after, size_t count, void*) {
    CALLED(cuGraphAddEventRecordNode)
    *node = add_node((Graph*)graph, false);
    for (size_t i = 0; i < count; i++) add_edge((Graph*)graph, (Node*)after[i], (Node*)*node);
    return SUCCESS;
}
int cuGraphAddDependencies_v2(void* graph, void** from, void** to, const EdgeData* data, size_t count) {
    CALLED(cuGraphAddDependencies)
    const int PROGRAMMATIC = 1;
    for (size_t i = 0; i < count; i++) {
        auto *one = (Node*)from[i], *other = (Node*)to[i];
        add_edge((Graph*)graph, one, other);
        bool is_programmatic = data[i].type == PROGRAMMATIC;
        if (is_programmatic && !(one->is_kernel && other->is_kernel)) refuse("a programmatic edge without kernels at both ends");
        if (data[i].from_port != (is_programmatic ? 1 : 0) || data[i].to_port != 0) refuse("an edge at a wrong port");
        programmatic_edges += is_programmatic;
    }
    return SUCCESS;
}
int cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) {
    CALLED(cuGraphInstantiate)
    if (calls["cuGraphLaunch"] > 0) built_late++;
    *executable = new Executable{((Graph*)graph)->nodes.size()};
    return SUCCESS;
}
int cuGraphUpload(void* graph, void*) {
    CALLED(cuGraphUpload)
    ((Executable*)graph)->uploaded = true;
    return SUCCESS;
}
int cuGraphDestroy(void* graph) {
    for (Node* node : ((Graph*)graph)->nodes) delete node;
    delete (Graph*)graph;
    return SUCCESS;
}
int cuGraphExecDestroy(void* graph) { delete (Executable*)graph; return SUCCESS; }
int cuGraphLaunch(void* graph, void*) {
    CALLED(cuGraphLaunch)
    if (((Executable*)graph)->nodes == 0) refuse("an empty graph is replayed");
    if (!((Executable*)graph)->uploaded) refuse("a graph is replayed that is not on the device");
    return SUCCESS;
}

int cuMemGetInfo_v2(size_t* free_bytes, size_t* total) { *total = memory(); *free_bytes = *total - device_bytes; return SUCCESS; }
int cuMemAlloc_v2(Address* address, size_t bytes) {
    CALLED(cuMemAlloc)
    if (device_bytes + bytes > memory()) return OUT_OF_MEMORY;
    *address = (Address)malloc(bytes);
    memset((void*)*address, 0xA5, bytes);
    take(*address, bytes, true);
    return SUCCESS;
}
int cuMemFree_v2(Address address) { give_back(address, true); free((void*)address); return SUCCESS; }
int cuMemHostAlloc(void** address, size_t bytes, unsigned) {
    CALLED(cuMemHostAlloc)
    *address = malloc(bytes);
    take((Address)*address, bytes, false);
    return SUCCESS;
}
int cuMemFreeHost(void* address) { give_back((Address)address, false); free(address); return SUCCESS; }
int cuMemHostGetDevicePointer_v2(Address* address, void* host, unsigned) { *address = (Address)host; return SUCCESS; }
int cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, void*) {
    CALLED(cuMemcpyHtoDAsync)
    if (!is_live(to, bytes)) refuse("a copy to nowhere");
    memcpy((void*)to, from, bytes);
    copied_to += bytes;
    return SUCCESS;
}
int cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, void*) {
    CALLED(cuMemcpyDtoHAsync)
    if (!is_live(from, bytes) || !is_live((Address)to, bytes)) refuse("a copy from nowhere");
    memcpy(to, (void*)from, bytes);
    copied_from += bytes;
    return SUCCESS;
}
int cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, void*) {
    CALLED(cuMemcpyDtoDAsync)
    if (!is_live(from, bytes) || !is_live(to, bytes)) refuse("a copy between nowheres");
    memcpy((void*)to, (void*)from, bytes);
    return SUCCESS;
}
int cuMemsetD8Async(Address address, unsigned char byte, size_t bytes, void*) {
    if (!is_live(address, bytes)) refuse("nowhere is filled");
    memset((void*)address, byte, bytes);
    return SUCCESS;
}

int cuEventCreate(void** event, unsigned) { *event = malloc(1); return SUCCESS; }
int cuEventDestroy_v2(void* event) { free(event); return SUCCESS; }
int cuEventRecord(void*, void*) { return SUCCESS; }
int cuEventSynchronize(void*) { CALLED(cuEventSynchronize) return SUCCESS; }
int cuEventElapsedTime_v2(float* milliseconds, void*, void*) { *milliseconds = 0.005f; return SUCCESS; }

// The image is an ELF file, whose tables of sections and segments are its last parts, or PTX up to a zero byte.
int cuModuleLoadData(void** module, const void* image) {
    CALLED(cuModuleLoadData)
    auto* bytes = (const unsigned char*)image;
    if (strstr((const char*)bytes, "\n.target sm_")) {
        *module = new Module{std::vector<unsigned char>(bytes, bytes + strlen((const char*)bytes) + 1)};
        return SUCCESS;
    }
    if (memcmp(bytes, "\x7f" "ELF", 4)) return INVALID_IMAGE;
    auto half = [&](size_t at) { return (size_t)*(const uint16_t*)(bytes + at); };
    size_t sections = *(const uint64_t*)(bytes + 40) + half(58) * half(60);
    size_t segments = *(const uint64_t*)(bytes + 32) + half(54) * half(56);
    auto* loaded = new Module;
    loaded->image.assign(bytes, bytes + (sections > segments ? sections : segments));
    *module = loaded;
    return SUCCESS;
}
int cuModuleUnload(void* module) { delete (Module*)module; return SUCCESS; }

// The sizes of the parameters of an entry: `.param .u64 name_param_0,`, or `.param .align 8 .b8 name_param_0[8],`.
static int ptx_function(void** function, const char* text, const char* name) {
    const char* at = strstr(text, (std::string(".entry ") + name + "(").c_str());
    if (!at) return NOT_FOUND;
    auto* found = new Function{name, {}, true};
    const char* end = strchr(at, ')');
    while ((at = strstr(at, ".param .")) && at < end) {
        at += strlen(".param .");
        bool is_struct = !strncmp(at, "align", 5);
        found->parameters.push_back(is_struct ? atoi(strchr(at, '[') + 1) : atoi(at + 1) / 8);
    }
    *function = found;
    return SUCCESS;
}

// A variable that the image names: all zeros, since no kernel runs here.
int cuModuleGetGlobal_v2(Address* at, size_t* bytes, void* module, const char* name) {
    CALLED(cuModuleGetGlobal)
    auto* of = (Module*)module;
    std::string image(of->image.begin(), of->image.end());
    if (image.find(std::string(1, 0) + name + std::string(1, 0)) == std::string::npos) return NOT_FOUND;
    of->variable.resize(1 << 20);
    *at = (Address)of->variable.data();
    *bytes = of->variable.size();
    return SUCCESS;
}
int cuMemcpyDtoH_v2(void* to, Address from, size_t bytes) {
    CALLED(cuMemcpyDtoH)
    memcpy(to, (void*)from, bytes);
    return SUCCESS;
}

// A kernel's parameters are attributes 0x17 of the section .nv.info.NAME: ordinal, offset, and the size in the upper 14 bits.
int cuModuleGetFunction(void** function, void* module, const char* name) {
    auto* bytes = ((Module*)module)->image.data();
    if (memcmp(bytes, "\x7f" "ELF", 4)) return ptx_function(function, (const char*)bytes, name);
    auto word = [&](size_t at) { return *(uint64_t*)(bytes + at); };
    auto half = [&](size_t at) { return *(uint16_t*)(bytes + at); };
    size_t table = word(40), size = half(58), count = half(60), names = word(table + half(62) * size + 24);
    auto* found = new Function{name, {}};
    bool has_code = false;
    for (size_t i = 0; i < count; i++) {
        size_t header = table + i * size;
        std::string section = (char*)bytes + names + *(uint32_t*)(bytes + header);
        has_code = has_code || section == std::string(".text.") + name;
        if (section != std::string(".nv.info.") + name) continue;
        size_t at = word(header + 24), end = at + word(header + 32);
        while (at < end) {
            if (bytes[at] == 4 && bytes[at + 1] == 0x17) {
                size_t ordinal = half(at + 8);
                if (found->parameters.size() <= ordinal) found->parameters.resize(ordinal + 1);
                found->parameters[ordinal] = *(uint32_t*)(bytes + at + 12) >> 18;
            }
            at += 4 + (bytes[at] == 4 ? half(at + 2) : 0);
        }
    }
    *function = found;
    return has_code ? SUCCESS : NOT_FOUND;
}
int cuFuncLoad(void*) { return SUCCESS; }
int cuFuncSetAttribute(void*, int, int) { return SUCCESS; }
// Every kernel has clusters as large as any.
int cuFuncGetAttribute(int* value, int attribute, void*) {
    const int CLUSTER_HEIGHT = 12;
    *value = attribute == CLUSTER_HEIGHT ? 16 : 0;
    return SUCCESS;
}
int cuFuncGetParamInfo(void* function, size_t index, size_t* offset, size_t* size) {
    auto& parameters = ((Function*)function)->parameters;
    if (index >= parameters.size()) return INVALID_VALUE;
    *offset = 0;
    *size = parameters[index];
    return SUCCESS;
}
int cuLaunchKernelEx(const LaunchConfig* config, void* function, void** arguments, void**) {
    CALLED(cuLaunchKernelEx)
    auto* kernel = (Function*)function;
    if (kernel->is_ptx && config->attribute_count > 0) refuse("a launch ahead of its predecessor of PTX that does not wait:", kernel->name);
    check_launch(config->grid, config->block, (Function*)function, arguments);
    if (calls["cuGraphLaunch"] > 0) launched_late++;
    return SUCCESS;
}

// Green contexts: SMs in steps of eight, those of the resource at byte 96.
int cuDeviceGetDevResource(int, void* resource, int) { CALLED(cuDeviceGetDevResource) ((unsigned*)resource)[24] = 132; return SUCCESS; }
int cuDevSmResourceSplitByCount(void* part, unsigned* groups, const void* all, void* rest, unsigned, unsigned least) {
    CALLED(cuDevSmResourceSplitByCount)
    unsigned there = ((const unsigned*)all)[24], taken = (least + 7) / 8 * 8;
    if (taken > there) return INVALID_VALUE;
    *groups = 1;
    ((unsigned*)part)[24] = taken;
    ((unsigned*)rest)[24] = there - taken;
    return SUCCESS;
}
int cuDevResourceGenerateDesc(void** description, void*, unsigned count) { *description = (void*)2; return count == 1 ? SUCCESS : INVALID_VALUE; }
int cuGreenCtxCreate(void** context, void*, int, unsigned) { CALLED(cuGreenCtxCreate) *context = (void*)3; return SUCCESS; }
int cuCtxFromGreenCtx(void** context, void*) { *context = (void*)4; return SUCCESS; }
int cuGreenCtxStreamCreate(void** stream, void*, unsigned flags, int) {
    CALLED(cuGreenCtxStreamCreate)
    *stream = malloc(1);
    return flags == 1 ? SUCCESS : INVALID_VALUE;
}
int cuGreenCtxDestroy(void*) { CALLED(cuGreenCtxDestroy) return SUCCESS; }
}
