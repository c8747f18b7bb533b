// The C++ API of attn_ops: pages, plans and steps of packages that attn_ops.export_package wrote.
//
//   attn::Planner planner("step.pt2");       // owns the plan and its workspace
//   attn::Package step("step.pt2");
//   attn::PageTable table(cache_pages, planner.page_size());
//   const auto request = table.add();
//   table.append(request, tokens);           // allocates pages
//   planner.plan(table.batch({request}));
//   const auto outputs = step.run({q, cache}, planner);
//
// It needs libtorch, of the version that wrote the package, and no library of attn_ops. docs/guide/export.md describes
// it. Errors are exceptions with the messages of the Python API; a call that is refused has written nothing.
#pragma once

#include "errors.h"
#include "metadata.h"
#include "package.h"
#include "page_table.h"
#include "planner.h"
