// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// CMakeLists.txt reads torch's header of this name to see whether it needs a
// patch. This one does not.
