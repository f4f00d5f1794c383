/* A library that imports answer(), through a slot of the kind that it is linked with. */
extern int answer(void);

int call(void) {
    return answer();
}

#ifdef CONSTRUCTOR
/* Runs while the loader holds its lock. */
extern void called_by_a_constructor(void);
__attribute__((constructor)) static void construct(void) {
    called_by_a_constructor();
}
#endif
