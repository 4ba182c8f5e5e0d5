/* The choice between a file's kernels, included once they are defined, with
 *
 *   kernel     a struct type with const char *name and int (*usable)(void)
 *   KERNELS    initialiser for an array of pointers to them, best first: a CPU that can run one can run
 *              those after it
 *   NAMES      their names in the same order, separated by commas
 *   PORTABLE   the one that runs everywhere
 *   PUBLIC(x)  the public name for x
 */

static const kernel *const choices[] = KERNELS;
static const kernel *active = &PORTABLE;

/* A null name asks for the best. */
static const kernel *usable_kernel(const char *name)
{
    for (size_t i = 0; i < sizeof choices / sizeof *choices; i++)
        if ((!name || !strcmp(name, choices[i]->name)) && choices[i]->usable())
            return choices[i];
    return NULL;
}

const char *PUBLIC(kernels)(void)
{
    return strstr(NAMES, usable_kernel(NULL)->name);
}

const char *PUBLIC(kernel)(void)
{
    return active->name;
}

int PUBLIC(use)(const char *name)
{
    const kernel *found = usable_kernel(name);
    if (!found)
        return -1;
    active = found;
    return 0;
}
